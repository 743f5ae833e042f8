"""Real disks that are full, the node's own and the broker's: a clear error, nothing acknowledged is lost, and
all goes on when there is room again."""

from __future__ import annotations

import pathlib
from collections.abc import Awaitable, Callable

import pytest

from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config, diagnosis
from muster.bus.client import client as bus_client
from muster.core import errors
from muster.inform import client
from muster.inform.node.log import view as log_view
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests import disks
from tests.cli import driver

StartNode = Callable[[str, pathlib.Path], Awaitable[child_process.ChildProcess]]


@pytest.fixture
def start_one(start_process, tmp_path) -> StartNode:
    """A node's process at that broker, with its view below that folder."""

    async def start(url: str, folder: pathlib.Path) -> child_process.ChildProcess:
        child: child_process.ChildProcess = await start_process(
            *driver.command_line("run", "inform", "--name", "n1", "--server", url),
            *(
                "--set",
                "inform.replicas=1",
                "--set",
                "inform.timeout_s=2",
                "--set",
                f"domain.data_dir={folder}",
            ),
            env={"MUSTER_HOME": str(tmp_path), "NO_COLOR": "1"},
        )
        await child.line("is up", timeout_s=60)
        return child

    return start


def value_of(number: int) -> bytes:
    return b"%d" % number + b"x" * 50_000


async def check(contexts: client.InformClient, numbers: range) -> None:
    for number in numbers:
        assert (await contexts.get(f"k{number}")).value == value_of(number)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_node_with_a_full_disk_continues_and_its_view_catches_up(
    broker, connect, start_one, small_disk
):
    view = small_disk / "local" / "inform" / "n1.db"
    node = await start_one(broker.url, small_disk)
    contexts = client.InformClient(await connect("ann"))
    for number in range(10):
        await contexts.put(f"k{number}", value_of(number))
    ballast = disks.fill(small_disk)
    last = 0
    for number in range(10, 40):  # acknowledged: they stand in the log, which is on another disk
        last = (await contexts.put(f"k{number}", value_of(number))).version
    await node.line("view-not-stored", timeout_s=60)
    await check(contexts, range(40))
    ballast.unlink()
    await node.line("view-stored-again", timeout_s=60)

    async def caught_up() -> bool:
        reader = log_view.ReplicaView(view, "n1")
        try:
            return (await reader.facts()).position >= last >> 20
        finally:
            await reader.close()

    await eventually(caught_up, timeout_s=60)
    await node.kill()
    await start_one(broker.url, small_disk)
    await check(contexts, range(40))


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_broker_whose_disk_is_full_refuses_loses_nothing_and_recovers(
    start_one, small_disk, tmp_path
):
    storage = config.BrokerStorage(directory=small_disk / "store")
    settings = config.BrokerConfig(name="one", directory=tmp_path / "one", storage=storage)
    async with (
        brokers.Broker(settings) as broker,
        await bus_client.connect((broker.url,), identity="ann") as bus,
    ):
        await start_one(broker.url, tmp_path)
        contexts = client.InformClient(bus, timeout_s=30.0)
        for number in range(10):
            await contexts.put(f"k{number}", value_of(number))
        ballast = disks.fill(small_disk)
        done, refusal = 10, None
        while refusal is None and done < 200:
            try:
                await contexts.put(f"k{done}", value_of(done))
                done += 1
            except errors.MusterError as error:
                refusal = error
        assert refusal is not None, "there was no room for 10 MB"
        assert "a full disk" in str(refusal.hint)
        problem = await eventually(broker.problem, timeout_s=30)
        assert isinstance(problem, diagnosis.BrokerFailed)
        assert problem.fault is diagnosis.BrokerFault.DISK_FULL
        await check(contexts, range(done))  # the node lives, and reads go on
        ballast.unlink()

        async def written() -> bool:
            try:
                await contexts.put("after", b"v")
            except errors.Unavailable:
                return False
            return True

        await eventually(written, timeout_s=90)
        assert await broker.problem() is None
        for number in range(done):
            kept = [change.value for change in (await contexts.history(f"k{number}")).changes]
            assert kept == [value_of(number)]
        assert (await contexts.get(f"k{done - 1}", max_staleness_s=0)).value == value_of(done - 1)
