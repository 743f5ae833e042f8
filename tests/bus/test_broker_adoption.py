"""Brokers that outlive the process that started them: adopted by a successor, or ended by a guardian."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import ssl
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from muster.bus import api
from muster.bus.brokers import broker, config, files, network, server_process
from muster.bus.client import client
from muster.supervision import os_process
from muster.testing.eventually import eventually, throughout
from muster.trust import certificates

STREAM = api.StreamSettings("work", ("work.>",), max_bytes=1 << 20)
FORMER = """
import asyncio, json, os, pathlib, sys
from muster.bus.brokers import broker, config, network, server_process

async def stand_still(process, *_):
    print(json.dumps([[process.pid, "", ""]]), flush=True)
    await asyncio.get_running_loop().create_future()

async def main(folder, outlive_s, until):
    if until == "launched":
        server_process.begin = stand_still
    if until == "begun":
        broker.Broker._wait_until_up = lambda self, process: stand_still(process)
    tls = None
    if until == "certified":
        pair, bundle = pathlib.Path(folder) / "brokers.pem", pathlib.Path(folder) / "bundle.pem"
        tls = config.BrokerTls(cert_file=pair, key_file=pair, ca_file=bundle)
    members = network.members(1, pathlib.Path(folder), tls=tls)
    if until == "linked":
        members += network.members(1, pathlib.Path(folder), prefix="far")
    async with network.BrokerNetwork(members, outlive_s=float(outlive_s)) as brokers:
        rows = [[member.pid, member.url, member.monitor_url] for member in brokers.brokers.values()]
        if until == "linked":
            await brokers.link("broker-1", "far-1")
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


async def killed_former(folder: Path, outlive_s: float, until: str = "") -> Former:
    """``until``: when it is killed, or what it does before."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORMER, str(folder), str(outlive_s), until, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    former = Former(*json.loads(await process.stdout.readline())[0])
    if former.url.startswith("nats:"):
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


@pytest.mark.parametrize("until", ["launched", "begun"])
@pytest.mark.parametrize("outlive_s", [0.0, 20.0])
async def test_no_second_server_uses_the_storage_of_one_that_had_just_started(
    tmp_path: Path, outlive_s: float, until: str
):
    former = await killed_former(tmp_path, outlive_s, until)
    async with successor(tmp_path) as brokers:
        (member,) = brokers.brokers.values()
        assert _servers(tmp_path) == [member.pid]
        assert former.runs == (former.pid == member.pid)


async def test_no_second_server_uses_the_storage_of_one_that_is_added_again(tmp_path: Path):
    former = await killed_former(tmp_path, 20.0)
    async with network.BrokerNetwork([], outlive_s=20.0) as brokers:
        await brokers.add(network.members(1, tmp_path)[0])
        assert _servers(tmp_path) == [former.pid]
        assert brokers["broker-1"].adopted


async def test_a_copy_of_a_folder_does_not_end_the_broker_of_the_original(tmp_path: Path):
    original, copied = tmp_path / "original", tmp_path / "copied"
    async with successor(original) as brokers:
        (member,) = brokers.brokers.values()
        pid = member.pid
        await asyncio.to_thread(shutil.copytree, original, copied, ignore=shutil.ignore_patterns("guardian"))
        async with successor(copied) as others:
            assert others["broker-1"].pid != pid
            assert (member.pid, member.restarts) == (pid, 0)


async def test_a_link_that_a_former_process_made_does_not_remain_unseen(tmp_path: Path):
    await killed_former(tmp_path, 20.0, "linked")
    members = [*network.members(1, tmp_path), *network.members(1, tmp_path, prefix="far")]
    async with network.BrokerNetwork(members, outlive_s=20.0) as brokers:
        near = brokers["broker-1"]
        assert near.adopted
        assert (await near.monitoring_page("leafz"))["leafs"], "the server has it, and no client sees it"
        assert await brokers.links() == []
        await brokers.reload_adopted()
        await eventually(lambda: _has_no_links(near))


async def test_a_certificate_that_was_renewed_before_an_adoption_is_used(tmp_path: Path):
    held = certificates.CertificateStore.create(tmp_path, "test", lifetime_s=86_400.0)
    held.ensure("brokers", ["127.0.0.1"], lifetime_s=3_600.0)
    pair = held.pair("brokers")
    assert (pair.path, pair.bundle) == (tmp_path / "brokers.pem", tmp_path / "bundle.pem")
    await killed_former(tmp_path, 20.0, "certified")
    before = ssl.PEM_cert_to_DER_cert(_first_certificate(pair.path))
    held.ensure("brokers", ["127.0.0.1", "localhost"], lifetime_s=3_600.0)
    now = ssl.PEM_cert_to_DER_cert(_first_certificate(pair.path))
    tls = config.BrokerTls(cert_file=pair.path, key_file=pair.path, ca_file=pair.bundle)
    async with successor(tmp_path, tls=tls) as brokers:
        assert brokers["broker-1"].adopted
        assert await _presented(brokers["broker-1"]) == before != now
        await brokers.reload_adopted()
        assert await _presented(brokers["broker-1"]) == now


def _first_certificate(path: Path) -> str:
    end = "-----END CERTIFICATE-----"
    text = path.read_text()
    return text[text.index("-----BEGIN CERTIFICATE-----") : text.index(end) + len(end)]


async def _presented(member: broker.Broker) -> bytes:
    """The certificate that a client sees."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", member.config.port)
    try:
        await reader.readline()  # the broker's INFO
        await writer.start_tls(context)
        presented: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return presented
    finally:
        writer.close()


async def _has_no_links(member: broker.Broker) -> bool:
    return not (await member.monitoring_page("leafz")).get("leafs")


async def test_an_interrupted_adoption_leaves_the_guardian_in_charge(tmp_path: Path, monkeypatch):
    """It does not take the interruption for a regular end of the server."""
    former = await killed_former(tmp_path, 3.0)
    loop, adopting, interrupted = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def slow_size(path: Path) -> int:
        loop.call_soon_threadsafe(adopting.set)
        interrupted.wait()
        return 0

    monkeypatch.setattr(files, "size", slow_size)
    starting = asyncio.create_task(successor(tmp_path).start())
    await adopting.wait()
    starting.cancel()
    interrupted.set()
    await asyncio.gather(starting, return_exceptions=True)
    await eventually(lambda: not former.runs, what="the guardian ends it")


def _servers(folder: Path) -> list[int]:
    """Without those that wait, and guardians."""
    settings = network.members(1, folder)[0]
    return sorted({*_pids_with(str(settings.config_path))} - {*_pids_with(str(settings.pipe_path))})


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


async def test_a_guardian_that_is_killed_is_replaced(tmp_path: Path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORMER, str(tmp_path), "0", "", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        ((pid, url, monitor_url),) = json.loads(await process.stdout.readline())
        former = Former(pid, url, monitor_url)
        (guardian,) = _kill_guardians(tmp_path, pid)
        await eventually(lambda: _guardians(tmp_path, pid) not in ([], [guardian]))
        assert former.runs
    finally:
        process.kill()
        await process.wait()
    await eventually(lambda: not former.runs, what="the new guardian ends the broker")
    await eventually(lambda: not _guardians(tmp_path, pid))


async def test_a_guardian_that_begins_without_a_domain_ends_the_broker(tmp_path: Path):
    """The domain was killed when it had let the server start, and its guardian had not read yet."""
    pipe = tmp_path / "guardian"
    os.mkfifo(pipe)
    server = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", server_process.GUARDED, "muster-broker", str(pipe), "1", "sleep", "600"),
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdin is not None
    server.stdin.write(b"\n")
    server.stdin.close()
    try:
        async with asyncio.timeout(60):
            assert await server.wait() == -signal.SIGTERM
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


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
