"""A domain that lost two of its three machines continues on the one that is left."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

import pytest

from muster.app import home
from muster.app.machines import membership, recovery
from muster.app.operations import backup
from muster.bus.brokers import binary
from muster.bus.streams import integrity
from muster.core import errors
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests.app import test_three_machines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.may_block(reason="files of the machines are read by this thread"),
]
STREAM, SUBJECT = test_three_machines.STREAM, test_three_machines.SUBJECT


@pytest.fixture
async def machines(tmp_path: Path) -> AsyncIterator[test_three_machines.Machines]:
    made = test_three_machines.Machines(tmp_path)
    try:
        await made.init()
        await made.join("b")
        await made.join("c")
        async with await made.connect("a", made.keyring().credentials("admin")) as operator:
            stream = await operator.stream(STREAM)
            for number in range(50):
                await stream.publish(SUBJECT, b"%d" % number)

            async def replicated() -> bool:
                return all(each.replicas == 3 and not each.behind for each in await operator.budgets())

            await eventually(replicated, timeout_s=60)
        yield made
    finally:
        for name in reversed(list(made.running)):
            await made.stop(name)


async def stored(machines: test_three_machines.Machines, name: str) -> list[bytes]:
    async with await machines.running[name].connect("admin", roles.Role.OPERATOR) as bus:
        stream = await bus.open_stream(STREAM.name)
        return [message.data async for message in stream.read(1)]


def log_of(brokers: Path) -> str:
    return "".join(file.read_text() for file in brokers.glob("*/broker.log"))


@contextlib.asynccontextmanager
async def returned(machines: test_three_machines.Machines, name: str) -> AsyncIterator[None]:
    """The broker of a machine, as it was."""
    (conf,) = (machines.folder / name / "fleet" / "brokers").glob("*/broker.conf")
    program = (await binary.find()).path
    process = await asyncio.create_subprocess_exec(program, "-c", conf)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def names_what_is_missing(machines: test_three_machines.Machines, name: str) -> bool:
    listed = (await machines.cli("doctor", "-o", "json", at=name)).json()
    found = {row["check"]: row for row in listed}
    silent, behind = found["machines"], found["streams"]
    return (
        "c has not been heard for" in silent["finding"]
        and silent["state"] == "fault"
        and "replicas are not current: fleet-c" in behind["finding"]
        and behind["state"] == "warning"
    )


async def away(*_: object, **__: object) -> None:
    raise errors.Unavailable("the broker is away")


async def publish(machines: test_three_machines.Machines, data: bytes) -> None:
    async with await machines.connect("b", machines.keyring("a").credentials("admin")) as bus:
        await (await bus.open_stream(STREAM.name)).publish(SUBJECT, data)


async def test_the_first_machine_goes_on_alone_and_refuses_those_that_were_lost(
    machines: test_three_machines.Machines, monkeypatch: pytest.MonkeyPatch
):
    refused = await machines.cli("recover")
    assert refused.code != 0
    assert "the domain runs" in refused.err
    await machines.stop("c")
    for name in "ba":  # any machine says what is missing in the whole domain
        await eventually(functools.partial(names_what_is_missing, machines, name), timeout_s=40)
    lost = machines.keyring("b").credentials("message")
    await machines.stop("a")
    answers = await machines.cli("recover")
    assert "b replies" in answers.err
    await machines.stop("b")

    with monkeypatch.context() as patch:  # a power cut in the middle
        patch.setattr(backup, "restore_streams", away)
        patch.setattr(recovery, "_roll_back", lambda _: None)
        interrupted = await machines.cli("recover")
    assert "the broker is away" in interrupted.err
    with pytest.raises(errors.Refused, match="was interrupted"):
        await machines.start("a")
    recovered = await machines.cli("recover")
    assert recovered.code == 0, recovered.err
    assert "to join again: b, c" in recovered.out
    assert "lost: nothing that was recorded" in recovered.out
    await machines.start("a")
    assert await stored(machines, "a") == [b"%d" % number for number in range(50)]
    assert not await machines.accepts("a", lost)

    # The lost brokers return, with certificates of the domain: two of three, so they are a majority.
    brokers = machines.running["a"].brokers
    assert brokers is not None
    logs = {name: machines.folder / name / "fleet" / "brokers" for name in "abc"}
    before = {name: len(log_of(folder)) for name, folder in logs.items()}
    async with returned(machines, "b"), returned(machines, "c"):

        def elected() -> bool:
            return any("new metadata leader" in log_of(logs[name])[before[name] :] for name in "bc")

        await eventually(elected, timeout_s=30)
        pinned = "certificate not pinned"
        await eventually(lambda: pinned in log_of(logs["a"])[before["a"] :], timeout_s=30)
        far = {link.far for link in await brokers.links() if link.up}
        assert not any(name.startswith(("fleet-b", "fleet-c")) for name in far), far
        assert len((await brokers.storage_group()).members) == 1
        assert await stored(machines, "a") == [b"%d" % number for number in range(50)]
    for name in "bc":
        shutil.rmtree(machines.folder / name)
        await machines.join(name)

    async def replicated() -> bool:
        return await machines.replicas() == {3}

    await eventually(replicated, timeout_s=60)


async def test_another_machine_takes_the_place_of_the_first_with_its_backup(
    machines: test_three_machines.Machines,
):
    file = machines.folder / "a.tar.gz"
    made = await machines.cli("backup", str(file))
    assert made.code == 0, made.err
    trust = machines.keyring()
    later = trust.issue("alice", roles.Role.USER)
    assert later
    alice = trust.credentials("alice")
    trust.issue("mallory", roles.Role.USER)
    mallory = trust.credentials("mallory")
    await eventually(lambda: machines.status("b", "mallory") == "valid", timeout_s=40)
    assert (await machines.cli("creds", "revoke", "mallory")).code == 0
    await eventually(lambda: machines.status("b", "mallory") == "revoked", timeout_s=40)
    await publish(machines, b"after the backup")
    for name in "cab":
        await machines.stop(name)
    shutil.rmtree(machines.folder / "a")
    refused = await machines.cli("recover", at="b")
    assert "--from" in refused.err
    recovered = await machines.cli("recover", "--from", str(file), at="b")
    assert recovered.code == 0, recovered.err
    await machines.start("b")
    assert machines.keyring("b").signs
    assert await stored(machines, "b") == [*(b"%d" % number for number in range(50)), b"after the backup"]
    listed = membership.load(machines.folder / "b" / "fleet")
    assert listed is not None
    assert [known.name for known in listed.machines] == ["b"]
    assert machines.status("b", "alice") == "valid"
    assert machines.status("b", "mallory") == "revoked"
    shutil.copytree(machines.folder / "b/fleet/certs", machines.folder / "a/fleet/certs")  # for `accepts`
    assert await machines.accepts("b", alice)
    assert not await machines.accepts("b", mallory)


async def test_a_domain_that_starts_meanwhile_keeps_its_storage(tmp_path: Path):
    folder = home.DomainFolder(tmp_path / "fleet")
    folder.create()
    (folder.brokers / "stored").touch()
    here = membership.Machine(name="a", roles=(), address="10.0.0.1", since_s=0.0, broker="fleet-1")
    machines = membership.MachineList(own="a", machines=(here,))
    with folder.hold(), pytest.raises(errors.Conflict, match="was started on this machine"):
        await recovery._replace_storage(mock.Mock(), mock.Mock(), machines, folder, tmp_path, [])
    assert [path.name for path in folder.brokers.iterdir()] == ["stored"]
    membership.check_whole(folder.root)


def test_what_is_lost_follows_from_what_was_recorded():
    mark = integrity.StreamMark("2026-11-18T00:00:00Z", 120)
    at_100 = backup.StreamBackup(name="kept", config={}, state={"last_seq": 100})
    assert recovery.missing({"kept": mark}, {"kept": at_100}) == {"kept": "the last 20 messages, 101 to 120"}
    assert recovery.missing({"gone": mark}, {}) == {"gone": "all messages: there is no replica here"}
    assert (
        recovery.missing(
            {"kept": mark}, {"kept": backup.StreamBackup(name="", config={}, state={"last_seq": 120})}
        )
        == {}
    )
