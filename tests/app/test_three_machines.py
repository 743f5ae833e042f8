"""A domain on several machines: three brokers with the output of `muster broker trust`, and copied keys."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster import connection
from muster.app import domain, enrolment, home, identities
from muster.app import settings as app_settings
from muster.app.components import bootstrap_client, management
from muster.bus import api
from muster.bus.brokers import binary
from muster.bus.client import client
from muster.core import errors
from muster.core.settings import loader
from muster.manage import settings as manage_settings
from muster.testing import child_process
from muster.testing.eventually import eventually
from muster.trust import credentials, keyring
from muster.trust.permissions import roles
from tests.cli import driver

CONFIG = """
server_name: {name}
listen: 127.0.0.1:{port}
include trust.conf
jetstream {{ store_dir: "{folder}/data", sync_interval: always }}
cluster {{ name: fleet, listen: 127.0.0.1:{route}, routes: [{routes}] }}
"""
NAMES = ("a", "b", "c")


class ThreeBrokers:
    """Each with a configuration of its own, as the guide describes."""

    def __init__(self, folder: Path, program: Path) -> None:
        self.folder = folder
        self.home = folder / "home-a"
        self._program = program
        self._running: dict[str, contextlib.AsyncExitStack] = {}
        with contextlib.ExitStack() as held:
            free = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
            self.ports, self._routes = (
                dict(zip(NAMES, [one.getsockname()[1] for one in half], strict=True))
                for half in (free[:3], free[3:])
            )
        self.urls = {name: f"nats://127.0.0.1:{port}" for name, port in self.ports.items()}

    def cli(self, *words: str) -> driver.Answer:
        return driver.quick(*words, home=self.home)

    def configure(self) -> None:
        servers = ",".join(self.urls.values())
        made = self.cli(
            *("init", "--name", "fleet", "--set", f"bus.servers={servers}"),
            *("--set", "health.enabled=false"),
        )
        assert made.code == 0, made.err
        for name in NAMES:
            folder = self.folder / name
            folder.mkdir()
            trust = self.cli("broker", "trust", "--accounts", str(folder / "accounts"))
            assert trust.code == 0, trust.err
            (folder / "trust.conf").write_text(trust.out)
            routes = [f"nats://127.0.0.1:{port}" for other, port in self._routes.items() if other != name]
            (folder / "nats.conf").write_text(
                CONFIG.format(
                    name=name,
                    port=self.ports[name],
                    folder=folder,
                    route=self._routes[name],
                    routes=", ".join(routes),
                )
            )

    def settings(self, name: str) -> app_settings.Settings:
        place = home.Home(self.folder / f"home-{name}")
        flags = {"domain.data_dir": str(place.root)}
        return loader.load(app_settings.Settings, file=place.settings_file, flags=flags)

    def keyring(self) -> keyring.Keyring:
        return keyring.Keyring.open(self.home / "fleet" / "keys")

    async def start(self, *names: str) -> None:
        async with contextlib.AsyncExitStack() as undo:
            for name in names:
                stack = self._running[name] = contextlib.AsyncExitStack()
                undo.push_async_callback(stack.aclose)
                started = child_process.start(self._program, "-c", self.folder / name / "nats.conf")
                server = await stack.enter_async_context(await started)
                await server.line("Server is ready", timeout_s=30)
            undo.pop_all()

    async def stop(self, *names: str) -> None:
        for name in names:
            await self._running.pop(name).aclose()

    async def accepts(self, name: str, creds: credentials.Credentials) -> bool:
        try:
            async with await client.connect([self.urls[name]], creds=creds):
                return True
        except errors.Unauthorized:
            return False


def enrolment_only(machine: str) -> management.ManagementComponent:
    """``a`` has the signing keys, and ``b`` the registry."""
    return management.ManagementComponent(
        manage_settings.ManageSettings(registries=int(machine == "b"), managers=0, agent=False)
    )


@pytest.fixture
async def brokers(tmp_path: Path) -> AsyncIterator[ThreeBrokers]:
    made = ThreeBrokers(tmp_path, (await binary.find()).path)
    await asyncio.to_thread(made.configure)
    await made.start(*NAMES)
    try:
        yield made
    finally:
        await made.stop(*made._running)


async def test_a_revocation_is_confirmed_by_every_broker_and_survives_their_restart(brokers: ThreeBrokers):
    trust = brokers.keyring()
    for name in ("alice", "bob"):
        trust.issue(name, roles.Role.USER)
    alice, bob = trust.credentials("alice"), trust.credentials("bob")
    async with contextlib.AsyncExitStack() as stack:
        connected = [
            await stack.enter_async_context(await client.connect([url], creds=alice))
            for url in brokers.urls.values()
        ]
        revoked = await asyncio.to_thread(brokers.cli, "creds", "revoke", "alice")
        assert revoked.code == 0, revoked.err
        assert "from now on" in revoked.out
        for name in NAMES:
            assert not await brokers.accepts(name, alice)
        await eventually(lambda: all(bus.state is not api.ConnectionState.CONNECTED for bus in connected))
    # One that is down is named, and the others have the revocation.
    await brokers.stop("c")
    failed = await asyncio.to_thread(brokers.cli, "creds", "revoke", "bob")
    assert failed.code == errors.Unavailable.exit_code
    assert "bob" in failed.err
    assert brokers.urls["c"] in failed.err
    assert brokers.urls["a"] not in failed.err
    assert [await brokers.accepts(name, bob) for name in "ab"] == [False, False]
    # It starts with the accounts as they were, and learns the new ones from the others.
    await brokers.start("c")
    assert not await brokers.accepts("c", alice)

    async def learnt() -> bool:
        return not await brokers.accepts("c", bob)

    await eventually(learnt, timeout_s=30)
    assert (await asyncio.to_thread(brokers.cli, "creds", "revoke", "bob")).code == 0
    # All of them at once, with the configuration of before.
    await brokers.stop(*NAMES)
    await brokers.start(*NAMES)
    assert not any([await brokers.accepts(name, each) for name in NAMES for each in (alice, bob)])


async def test_brokers_that_cannot_store_accounts_are_named(brokers: ThreeBrokers, monkeypatch):
    monkeypatch.setattr(identities, "CONFIRM_S", 0.5)
    await brokers.stop("b")
    path = brokers.folder / "b" / "trust.conf"
    text = path.read_text()
    start, end = text.index("resolver: "), text.index("resolver_preload")
    path.write_text(f"{text[:start]}resolver: MEMORY\n{text[end:]}")
    await brokers.start("b")
    brokers.keyring().issue("alice", roles.Role.USER)
    failed = await asyncio.to_thread(brokers.cli, "creds", "revoke", "alice")
    assert failed.code == errors.Unavailable.exit_code
    assert f"1 of 3 brokers did not confirm the new account: {brokers.urls['b']}" in failed.err


async def test_a_machine_joins_while_every_machine_runs_a_domain_process(brokers: ThreeBrokers, tmp_path):
    await asyncio.to_thread(brokers.keyring().issue, "registry-1", roles.Role.REGISTRY)
    for name in ("b", "c"):
        copy = tmp_path / f"home-{name}"
        await asyncio.to_thread(shutil.copytree, brokers.home, copy)
        (copy / "fleet/keys/keys/signing.seed").unlink()
    async with contextlib.AsyncExitStack() as stack:
        domains: list[domain.Domain] = []
        for name in NAMES:
            made = domain.Domain(brokers.settings(name), components=[enrolment_only(name)])
            domains.append(await stack.enter_async_context(made))
        admin = await stack.enter_async_context(await domains[0].connect("admin", roles.Role.OPERATOR))
        for attempt in range(3):
            issued = await bootstrap_client.BootstrapClient(admin).token("host-d")
            token = enrolment.EnrolmentToken.parse(issued.token)
            folder = tmp_path / f"machine-{attempt}"
            key = await asyncio.to_thread(enrolment.machine_key, folder)
            asking = await connection.connect(token.servers, creds=credentials.Credentials.parse(token.creds))
            async with asking:
                answer = await bootstrap_client.BootstrapClient(asking).enrol(key.public)
            creds = credentials.Credentials(answer.jwt, key.seed)
            assert [await brokers.accepts(name, creds) for name in NAMES] == [True, True, True]
        records = brokers.keyring().records()
        assert [record.identity for record in records if record.identity == "host-d"] == ["host-d"]


async def test_a_domain_that_starts_sends_what_was_revoked_while_no_broker_ran(
    brokers: ThreeBrokers, tmp_path: Path
):
    trust = brokers.keyring()
    trust.issue("alice", roles.Role.USER)
    alice = trust.credentials("alice")
    await brokers.stop(*NAMES)
    trust.revoke("alice")
    await brokers.start(*NAMES)
    assert await brokers.accepts("b", alice)
    async with domain.Domain(brokers.settings("a"), components=[enrolment_only("a")]):

        async def refused() -> bool:
            return not any([await brokers.accepts(name, alice) for name in NAMES])

        await eventually(refused)
