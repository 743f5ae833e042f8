"""Brokers that outlive the process that started them: adopted by a successor, or ended by a guardian."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.bus import api
from muster.bus.brokers import broker, config, network, server_process
from muster.bus.client import client
from muster.supervision import os_process
from muster.testing.eventually import eventually, throughout

STREAM = api.StreamSettings("work", ("work.>",), max_bytes=1 << 20)
FORMER = """
import asyncio, json, pathlib, sys
from muster.bus.brokers import config, network

async def main(folder, outlive_s):
    members = network.members(1, pathlib.Path(folder))
    async with network.BrokerNetwork(members, outlive_s=float(outlive_s)) as brokers:
        rows = [[member.pid, member.url, member.monitor_url] for member in brokers.brokers.values()]
        print(json.dumps(rows), flush=True)
        await asyncio.get_running_loop().create_future()

asyncio.run(main(*sys.argv[1:]))
"""


class Former:
    """A process with a broker, which is killed."""

    def __init__(self, pid: int, url: str, monitor_url: str) -> None:
        self.pid, self.url, self.monitor_url = pid, url, monitor_url
        self.started = os_process.start_time(pid)

    @property
    def runs(self) -> bool:
        return os_process.start_time(self.pid) == self.started


async def killed_former(folder: Path, outlive_s: float) -> Former:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORMER, str(folder), str(outlive_s), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    ((pid, url, monitor_url),) = json.loads(await process.stdout.readline())
    former = Former(pid, url, monitor_url)
    async with await client.connect([former.url]) as bus:
        await (await bus.stream(STREAM)).publish("work.1", b"stored before")
    process.kill()
    await process.wait()
    return former


def successor(folder: Path, **changes: Any) -> network.BrokerNetwork:
    members = [dataclasses.replace(member, **changes) for member in network.members(1, folder)]
    return network.BrokerNetwork(members, outlive_s=20.0)


async def test_the_successor_of_a_killed_process_adopts_its_broker(tmp_path: Path):
    former = await killed_former(tmp_path, 20.0)
    async with await client.connect([former.url]) as bus:
        connection = bus.connection
        async with successor(tmp_path) as brokers:
            (member,) = brokers.brokers.values()
            assert (member.pid, member.url, member.adopted) == (former.pid, former.url, True)
            assert bus.connection == connection, "its clients notice nothing"
            await throughout(lambda: former.runs, for_s=0.3)
            os.kill(former.pid, signal.SIGKILL)
            await eventually(lambda: member.pid not in (None, former.pid))
            assert (member.url, member.adopted) == (former.url, False), "it is supervised"
            assert await eventually(lambda: _stored(bus)) == b"stored before"
            last = member.pid
        assert os_process.start_time(last or 0) == "", "it ends with its process, if that stops"


async def _stored(bus: client.NatsBus) -> bytes | None:
    stored = await (await bus.stream(STREAM)).last_for("work.1")
    return None if stored is None else stored.data


@pytest.mark.parametrize("reason", ["settings", "guardian", "frozen"])
async def test_a_broker_that_cannot_be_adopted_is_replaced(tmp_path: Path, reason: str, monkeypatch):
    former = await killed_former(tmp_path, 20.0)
    changes: dict[str, Any] = {}
    match reason:
        case "settings":
            changes["payload_bytes_max"] = 1 << 20
        case "guardian":
            await eventually(lambda: not _kill_guardians(tmp_path, former.pid))
        case "frozen":
            monkeypatch.setattr(broker, "STOP_TIMEOUT_S", 0.1)
            os.kill(former.pid, signal.SIGSTOP)
    async with successor(tmp_path, **changes) as brokers:
        (member,) = brokers.brokers.values()
        assert member.pid != former.pid
        assert not member.adopted
        assert not former.runs
        assert member.url == former.url, "peers and clients know its ports"
        async with await client.connect([member.url]) as bus:
            assert await _stored(bus) == b"stored before"
        await eventually(lambda: len(_guardians(tmp_path, former.pid)) == 1, what="one guardian is left")


def _guardians(folder: Path, broker_pid: int) -> list[int]:
    settings = network.members(1, folder)[0]
    return [pid for pid in _pids_with(str(settings.pipe_path)) if pid != broker_pid]


def _kill_guardians(folder: Path, broker_pid: int) -> list[int]:
    """Kill the guardians that are found now. One that looks for a successor starts processes that wait at its
    pipe for up to a second, so another search may find more."""
    pids = _guardians(folder, broker_pid)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def _pids_with(word: str) -> list[int]:
    """Processes with this word in their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


async def test_without_a_successor_the_guardian_ends_the_broker(tmp_path: Path):
    former = await killed_former(tmp_path, 0.5)
    await eventually(lambda: not former.runs)


def test_a_fingerprint_ignores_what_changes_while_a_broker_runs(tmp_path: Path):
    def settings(accounts: dict[str, str], **changes: Any) -> config.BrokerConfig:
        trust = config.OperatorTrust(
            operator_jwt="o", system_account="S", accounts={"S": "system", **accounts}
        )
        ports = {"port": 4222, "monitor_port": 8222, "leaf": config.BrokerListener(port=7422)}
        return config.BrokerConfig(name="b", directory=tmp_path, trust=trust, **{**ports, **changes})

    first = server_process.fingerprint(settings({"A": "one"}))
    link = config.LeafRemote(id="l", urls=("nats://127.0.0.1:1",))
    assert server_process.fingerprint(settings({"A": "another"}, remotes=(link,))) == first
    assert server_process.fingerprint(settings({"A": "one"}, port=4223)) != first
    assert server_process.fingerprint(settings({"A": "one"}, ping_interval_s=9.0)) != first
