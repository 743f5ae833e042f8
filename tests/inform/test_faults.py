"""Real processes: kill -9 of a primary, a holder and an initiator under load; a broker that comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from muster.core import errors
from muster.inform import client
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests.cli import driver

StartNode = Callable[[str], Awaitable[child_process.ChildProcess]]


@pytest.fixture
def node_process(broker, start_process, tmp_path) -> StartNode:
    async def start(name: str) -> child_process.ChildProcess:
        quick = ("refresh_s=0.3", "lost_after_s=2", "timeout_s=1.5", "history=5000")
        child: child_process.ChildProcess = await start_process(
            *driver.command_line("run", "inform", "--name", name, "--set", f"domain.data_dir={tmp_path}"),
            *(word for setting in quick for word in ("--set", f"inform.{setting}")),
            *("--server", broker.url),
            env={"MUSTER_HOME": str(tmp_path), "NO_COLOR": "1"},
        )
        await child.line("is up", timeout_s=30)
        return child

    return start


class ContextLoad:
    """Writers that remember what was acknowledged to them."""

    def __init__(self, contexts: client.InformClient) -> None:
        self._contexts = contexts
        self.acknowledged: dict[int, bytes] = {}
        self._tasks = [asyncio.create_task(self._write(number)) for number in range(4)]

    async def _write(self, writer: int) -> None:
        number = 0
        while True:
            await asyncio.sleep(0.01)  # pace
            number += 1
            value = b"%d/%d" % (writer, number)
            try:
                written = await self._contexts.put("k", value)
            except errors.Unavailable:
                continue
            self.acknowledged[written.version] = value

    async def more(self, count: int) -> None:
        before = len(self.acknowledged)
        await eventually(lambda: len(self.acknowledged) >= before + count, timeout_s=30)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def watched(contexts: client.InformClient, received: dict[int, bytes | None]) -> None:
    async for change in contexts.watch("k"):
        assert change.version > max(received, default=0)
        received[change.version] = change.value


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_kill_of_the_primary_a_holder_and_an_initiator_loses_nothing(node_process, connect):
    nodes = {name: await node_process(name) for name in ("n1", "n2", "n3", "n4")}
    bus = await connect("ann")
    contexts = client.InformClient(bus, timeout_s=6.0)

    async def know_each_other() -> bool:
        return len(await contexts.nodes()) == 4

    await eventually(know_each_other, timeout_s=30)
    await contexts.put("k", b"first", ack="replicated")
    received: dict[int, bytes | None] = {}
    watching = asyncio.create_task(watched(client.InformClient(await connect("watch")), received))
    load = ContextLoad(contexts)
    await load.more(20)

    async def copies() -> dict[str, str]:
        try:
            return {view.node: view.replica_kind for view in (await contexts.where("k")).replicas}
        except errors.MusterError:
            return {}

    async def three() -> dict[str, str] | None:
        matches = await copies()
        return (
            matches
            if len(matches) == 3 and "primary" in matches.values() and set(matches) <= set(nodes)
            else None
        )

    for kind in ("primary", "permanent", "none"):
        actual = await eventually(three, timeout_s=30)
        assert actual is not None
        victim = next(name for name in sorted(nodes) if actual.get(name, "none") == kind)
        await nodes.pop(victim).kill()
        await load.more(20)
        nodes[victim] = await node_process(victim)
    await load.end()
    fresh = await contexts.get("k", max_staleness_s=0)
    assert fresh.version >= max(load.acknowledged)
    await eventually(lambda: max(received, default=0) >= fresh.version, timeout_s=30)
    lost = {version for version, value in load.acknowledged.items() if received.get(version) != value}
    assert not lost, "a watcher receives every acknowledged change"
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.timeout(110)
async def test_a_broker_killed_and_started_again_loses_nothing(broker, start_node, inform):
    node: Any = await start_node("n1", timeout_s=10.0)
    await inform.put("k", b"before")
    pid = broker.pid
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: broker.pid not in (pid, None), timeout_s=30)  # its supervisor starts it again

    async def written() -> bool:
        try:
            await inform.put("k", b"after")
        except errors.Unavailable:
            return False
        return True

    await eventually(written, timeout_s=30)
    values = [change.value for change in (await inform.history("k")).changes]
    assert (values[0], values[-1]) == (b"before", b"after")
    assert node.failure() is None
