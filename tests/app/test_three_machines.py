"""A domain on three machines, each with an address of its own: joining, storage, revocations, removal."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from muster.app import domain, enrolment, home
from muster.app import settings as app_settings
from muster.app.components import bootstrap_client, management
from muster.app.machines import join_client, membership
from muster.app.machines import roles as machine_roles
from muster.bus import api
from muster.bus.client import client
from muster.core import errors, subjects
from muster.core.settings import loader
from muster.manage import settings as manage_settings
from muster.testing.eventually import eventually
from muster.trust import credentials, keyring
from muster.trust.permissions import roles
from tests.cli import driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = ("bus.tls=on", "health.enabled=false", "web.enabled=false", "bus.locator=false")
SUBJECT = f"{subjects.TOPIC_PREFIX}.kept"
STREAM = api.StreamSettings("kept", subjects=(SUBJECT,), max_bytes=64 << 20)


class Machines:
    """Domains of this process, on addresses of the loopback network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._network = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
        self.running: dict[str, domain.Domain] = {}
        self._stacks: dict[str, contextlib.AsyncExitStack] = {}

    def address(self, name: str) -> str:
        return f"{self._network}.{1 + 'abcd'.index(name)}"

    def url(self, name: str) -> str:
        return f"tls://{self.address(name)}:4222"

    async def cli(self, *words: str, at: str = "a") -> driver.Answer:
        return await asyncio.to_thread(driver.quick, *words, home=self.folder / at)

    async def init(self) -> None:
        options = [word for setting in SETTINGS for word in ("--set", setting)]
        made = await self.cli("init", "--name", "fleet", "--host", self.address("a"), *options)
        assert made.code == 0, made.err
        await self.start("a")

    async def start(self, name: str) -> None:
        settings = loader.load(
            app_settings.Settings,
            file=self.folder / name / "muster.toml",
            flags={"domain.data_dir": str(self.folder / name), "bus.locator": False, "health.enabled": False},
        )
        # The signing machine admits the others, and its registry stores their tokens.
        manage = manage_settings.ManageSettings(registries=int(name == "a"), managers=0, agent=False)
        stack = self._stacks[name] = contextlib.AsyncExitStack()
        made = domain.Domain(settings, components=[management.ManagementComponent(manage)])
        self.running[name] = await stack.enter_async_context(made)

    async def stop(self, name: str) -> None:
        del self.running[name]
        await self._stacks.pop(name).aclose()

    async def token(self, *chosen: str) -> enrolment.EnrolmentToken:
        async with await self.running["a"].connect("admin", roles.Role.OPERATOR) as admin:
            issued = await bootstrap_client.BootstrapClient(admin).token(
                "", machine_roles=chosen or machine_roles.ALL
            )
        return enrolment.EnrolmentToken.parse(issued.token)

    def choices(self, name: str) -> join_client.JoinChoices:
        address = self.address(name)
        return join_client.JoinChoices(name=name, address=address, listen=address, zone=name)

    async def join(self, name: str) -> None:
        place = home.Home(self.folder / name)
        await join_client.join(place, await self.token(), self.choices(name), waiting=lambda _: None)
        await self.start(name)

    def listed(self, name: str) -> tuple[membership.Machine, ...]:
        known = membership.load(self.folder / name / "fleet")
        assert known is not None
        return known.machines

    def keyring(self, name: str = "a") -> keyring.Keyring:
        return keyring.Keyring.open(self.folder / name / "fleet" / "keys")

    async def connect(self, name: str, creds: credentials.Credentials) -> client.NatsBus:
        from muster.connection import trusting

        tls = await asyncio.to_thread(trusting, str(self.folder / "a/fleet/certs/bundle.pem"))
        return await client.connect([self.url(name)], creds=creds, tls=tls)

    async def accepts(self, name: str, creds: credentials.Credentials) -> bool:
        try:
            async with await self.connect(name, creds):
                return True
        except errors.Unauthorized:
            return False

    def status(self, name: str, identity: str) -> str:
        """Of credentials, as this machine knows them."""
        try:
            return self.keyring(name).show(identity).status
        except errors.NotFound:
            return "unknown"

    async def replicas(self) -> set[int]:
        return {budget.replicas for budget in await self.running["a"].bus.budgets()}


@pytest.fixture
async def machines(tmp_path: Path) -> AsyncIterator[Machines]:
    made = Machines(tmp_path)
    try:
        yield made
    finally:
        for name in reversed(list(made.running)):
            await made.stop(name)


@pytest.mark.may_block(reason="files of the machines are read by this thread")
async def test_three_machines_replicate_refuse_revoked_identities_and_replace_a_lost_one(machines: Machines):
    await machines.init()
    issued = await machines.token()
    operator = await machines.connect("a", machines.keyring().credentials("admin"))
    async with operator:
        stream = await operator.stream(STREAM)
        stored: list[int] = []
        stop = asyncio.Event()

        async def write() -> None:
            """As fast as it is acknowledged. An acknowledgement may be lost when a stream gets replicas: a
            repeat with the same id is stored once."""
            while not stop.is_set():
                number = str(len(stored))
                with contextlib.suppress(errors.Unavailable):
                    sequence = await stream.publish(SUBJECT, number.encode(), message_id=number, timeout_s=2)
                    stored.append(sequence)

        writing = asyncio.create_task(write())
        await machines.join("b")

        async def unreplicated() -> bool:
            return "streams are not replicated" in str(await machines.running["a"].status())

        await eventually(unreplicated)
        assert await machines.replicas() == {1}
        own = next(known.broker for known in machines.listed("a") if known.name == "b")
        assert machines.running["b"].bus.broker == own, "it does not depend on another machine"
        await machines.join("c")

        async def replicated() -> bool:
            return await machines.replicas() == {3}

        await eventually(replicated, timeout_s=60)
        count = len(stored)
        await eventually(lambda: writing.done() or len(stored) > count + 20, timeout_s=30)
        stop.set()
        await writing
        assert stored == list(range(stored[0], stored[0] + len(stored)))  # none lost, none twice

    # What a machine has: its own credentials, and no key that signs.
    for name in "bc":
        kept = {path.name for path in (machines.folder / name).rglob("*") if path.suffix in (".seed", ".key")}
        assert kept == {"secrets.key"}
        assert not (machines.folder / name / "fleet/certs/ca.pem").exists()
        assert machines.keyring(name).key_of_secrets().public == machines.keyring().key_of_secrets().public
    taken = msgspec.structs.replace(machines.choices("d"), name="b", zone="b")
    spent = join_client.join(home.Home(machines.folder / "d"), issued, taken, waiting=print)
    with pytest.raises(errors.Conflict, match="has a machine 'b' already"):
        await spent

    # Revocations reach each broker, or the command names it.
    trust = machines.keyring()
    for name in ("alice", "bob"):
        trust.issue(name, roles.Role.USER)
    alice, bob = trust.credentials("alice"), trust.credentials("bob")
    await eventually(lambda: machines.status("b", "alice") == "valid", timeout_s=10)
    connected = [await machines.connect(name, alice) for name in "abc"]
    revoked = await machines.cli("creds", "revoke", "alice")
    assert revoked.code == 0, revoked.err
    assert [await machines.accepts(name, alice) for name in "abc"] == [False] * 3
    await eventually(lambda: all(bus.state is not api.ConnectionState.CONNECTED for bus in connected))
    for bus in connected:
        await bus.close()
    await eventually(lambda: machines.status("c", "alice") == "revoked", timeout_s=10)
    roaming = await machines.connect("c", trust.credentials("admin"))
    await machines.stop("c")
    await eventually(lambda: roaming.state is api.ConnectionState.CONNECTED, timeout_s=15)
    assert roaming.broker in [known.broker for known in machines.listed("a") if known.name != "c"]
    await roaming.close()
    failed = await machines.cli("creds", "revoke", "bob")
    assert failed.code != 0
    assert machines.url("c") in failed.err
    assert machines.url("b") not in failed.err
    await machines.start("c")

    async def learnt() -> bool:
        return not await machines.accepts("c", bob)

    await eventually(learnt, timeout_s=30)

    assert set((await machines.token()).servers) == {machines.url(name) for name in "abc"}

    # A lost machine is removed, and another one takes its place under the same name.
    old = machines.keyring("c").credentials("message")
    await machines.stop("c")
    removed = await machines.cli("machine", "remove", "c")
    assert removed.code == 0, removed.err
    machines.folder.joinpath("c").rename(machines.folder / "lost")
    await machines.join("c")

    async def whole() -> bool:
        brokers = machines.running["a"].brokers
        assert brokers is not None
        group = await brokers.storage_group()
        listed = membership.load(machines.folder / "a" / "fleet")
        assert listed is not None
        return len(group.members) == 3 and group.current == {known.broker for known in listed.storing}

    await eventually(whole, timeout_s=60)
    await eventually(replicated, timeout_s=60)
    assert [await machines.accepts(name, old) for name in "abc"] == [False] * 3
    assert membership.load(machines.folder / "b" / "fleet") is not None

    # Without the machine that signs, the others know who there is, and not in which state.
    await machines.stop("a")
    listed = await machines.cli("machine", "list", "-o", "json", at="b")
    assert listed.code == 0, listed.err
    assert {row["name"]: row["state"] for row in listed.json()} == dict.fromkeys(
        ("local", "b", "c"), "unknown"
    )
    assert "local, which signs accounts, does not reply" in listed.err
