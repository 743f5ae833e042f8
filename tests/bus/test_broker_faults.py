"""Brokers that cannot start, or end early: each error has its cause and a hint."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import signal
import socket
import stat
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.bus import api
from muster.bus.brokers import binary, broker, config, diagnosis, monitor, network
from muster.bus.client import client as bus_client
from muster.core import backoff, errors
from muster.testing.eventually import eventually
from tests import disks

Fault = diagnosis.BrokerFault


@pytest.fixture
def settings(tmp_path):
    return config.BrokerConfig(name="one", directory=tmp_path / "one")


async def failure(settings, **options) -> diagnosis.BrokerFailed:
    with pytest.raises(diagnosis.BrokerFailed) as caught:
        async with broker.Broker(settings, **options):
            pass
    return caught.value


# Faults at the start


@pytest.mark.parametrize("door", ["port", "monitor_port", "leaf", "websocket", "mqtt"])
async def test_a_taken_port_is_named(settings, door):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        value = number if door.endswith("port") else config.BrokerListener(port=number)
        error = await failure(dataclasses.replace(settings, **{door: value}))
    assert error.fault is Fault.PORT_TAKEN
    assert f"127.0.0.1:{number} is in use by another program" in error.message
    assert "another port" in str(error.hint)


async def test_a_port_that_is_taken_behind_our_back_is_named_by_the_servers_own_complaint(settings):
    server = broker.Broker(settings)
    await server.reserve()
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", server.config.port))
        thief.listen()
        with pytest.raises(diagnosis.BrokerFailed, match="is in use by another program") as caught:
            await server.start()
    assert caught.value.fault is Fault.PORT_TAKEN
    assert caught.value.log_tail


async def test_an_address_that_is_not_ours_is_named(settings):
    error = await failure(dataclasses.replace(settings, host="192.0.2.77", plaintext=True))
    assert error.fault is Fault.BAD_ADDRESS
    assert "is not an address of this machine" in error.message


async def test_a_directory_that_cannot_be_is_named(settings, tmp_path):
    (tmp_path / "file").write_text("")
    error = await failure(dataclasses.replace(settings, directory=tmp_path / "file" / "one"))
    assert error.fault is Fault.UNWRITABLE
    assert str(tmp_path / "file") in error.message
    assert "configure another directory" in str(error.hint)


async def test_a_store_that_cannot_be_is_named(settings, tmp_path):
    (tmp_path / "file").write_text("")
    error = await failure(
        dataclasses.replace(settings, storage=config.BrokerStorage(directory=tmp_path / "file" / "store"))
    )
    assert error.fault is Fault.UNWRITABLE


async def test_certificates_that_are_not_there_are_named(settings, tmp_path):
    missing = tmp_path / "missing.pem"
    tls = config.BrokerTls(cert_file=missing, key_file=missing, ca_file=missing)
    error = await failure(dataclasses.replace(settings, tls=tls))
    assert error.fault is Fault.BAD_CONFIG
    assert "missing.pem" in error.message


async def test_a_full_disk_is_named_at_the_start(settings, small_disk):
    (small_disk / "ballast").write_bytes(bytes(22 * config.MIB))
    error = await failure(dataclasses.replace(settings, directory=small_disk / "one"))
    assert error.fault is Fault.DISK_FULL
    assert "free some space" in str(error.hint)


async def test_a_disk_that_fills_up_under_way_is_named(settings, small_disk):
    storage = config.BrokerStorage(directory=small_disk / "store")
    async with broker.Broker(dataclasses.replace(settings, storage=storage)) as server:
        assert await server.problem() is None
        import nats

        client = await nats.connect(server.url)
        try:
            await client.jetstream().add_stream(name="s", subjects=["s"])
            for _ in range(40):
                await client.publish("s", bytes(config.MIB - 1000))
            await client.flush()
            problem = await eventually(server.problem)
        finally:
            await client.close()
        assert isinstance(problem, diagnosis.BrokerFailed)
        assert problem.fault is Fault.DISK_FULL
        assert "free some space" in str(problem.hint)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.may_block(reason="the disk is filled")
async def test_a_cluster_whose_disk_was_full_stores_again(small_disk):
    """Its members do not say that the disk was full, only that their storage is not enabled."""
    async with (
        network.mesh(3, small_disk, storage=config.BrokerStorage()) as brokers,
        await bus_client.connect(brokers.urls) as bus,
    ):
        stream = await bus.stream(api.StreamSettings("log", ("log.>",), replicas=3))
        ballast = await asyncio.to_thread(disks.fill, small_disk)

        async def none_stores() -> bool:
            with contextlib.suppress(errors.MusterError):
                await stream.publish("log.a", bytes(100_000), timeout_s=1.0)
            return not any([(await member.health()).ok for member in brokers.brokers.values()])

        await eventually(none_stores, timeout_s=60)
        ballast.unlink()

        async def stores() -> bool:
            try:
                await stream.publish("log.a", b"x", timeout_s=2.0)
            except errors.MusterError:
                return False
            return True

        await eventually(stores, timeout_s=60)


# The program


def program(folder: Path, text: str) -> Path:
    path = folder / "nats-server"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("echo nats-server: v2.9.1", "is nats-server 2.9.1; Muster needs 2.12.0 or later"),
        ("echo mosquitto version 2.0.1", "is not a nats-server"),
        ("exit 3", "is not a nats-server"),
    ],
)
async def test_a_program_that_will_not_do_is_refused(settings, tmp_path, text, complaint):
    with pytest.raises(errors.MissingDependency, match=complaint) as caught:
        await broker.Broker(settings, program=program(tmp_path, text)).start()
    assert "settings" in str(caught.value.hint)


async def test_a_program_that_is_not_there_is_named(settings, tmp_path):
    with pytest.raises(errors.MissingDependency, match="is not a program that can be run"):
        await broker.Broker(settings, program=tmp_path / "nowhere").start()


async def test_the_program_of_the_wheel_is_found_and_new_enough_for_everything():
    matches = await binary.find()
    for feature in binary.FEATURES:
        matches.require(feature.name)


def test_a_feature_that_the_program_is_too_old_for_is_named():
    old = binary.ServerBinary(Path("/usr/bin/nats-server"), (2, 12, 3))
    old.require("atomic batch publish")
    with pytest.raises(
        errors.MissingDependency, match=r"live leaf links needs nats-server 2\.14\.0 or later"
    ):
        old.require("live leaf links")


# Falls and restarts


async def test_a_broker_that_falls_is_started_again_on_the_same_port(settings):
    async with broker.Broker(settings) as server:
        before = (server.url, server.pid)
        assert server.pid
        os.kill(server.pid, signal.SIGKILL)
        await eventually(lambda: server.restarts == 1)
        assert server.url == before[0]
        assert server.pid != before[1]
        assert (await server.health()).ok
        assert isinstance(server.failure, diagnosis.BrokerFailed)
        assert "was killed by signal 9" in server.failure.message


async def test_a_broker_that_keeps_falling_is_given_up_with_the_end_of_its_log(settings):
    rules = backoff.BackoffPolicy(crashes_max=3, pause_s=0.001)
    async with broker.Broker(settings, supervise=rules) as server:
        config_path = server.config.config_path
        config_path.write_text(
            config_path.read_text().replace('"server_name"', '"nonsense": 1, "server_name"')
        )
        assert server.pid
        os.kill(server.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            await server.wait_for(broker.BrokerState.FAILED)
        assert isinstance(server.failure, diagnosis.BrokerFailed)
        assert server.failure.fault is Fault.CRASH_LOOP
        assert (
            "crashed 3 times and is not restarted any more; the last error: broker one: the server refuses"
            in (server.failure.message)
        )
        assert 'unknown field "nonsense"' in server.failure.message
        assert any("nonsense" in line for line in server.failure.log_tail)
        assert await server.problem() is server.failure


@given(crashes=st.integers(1, 200), limit=st.integers(0, 300))
def test_pauses_are_bounded_and_a_first_crash_is_not_kept_waiting(crashes, limit):
    rules = backoff.BackoffPolicy(crashes_max=limit)
    history = backoff.CrashHistory(rules)
    pause_s = [history.crashed(number / 10) for number in range(crashes)][-1]
    if pause_s is None:
        assert crashes >= limit
    else:
        assert crashes < limit
        assert 0 <= pause_s <= rules.pause_s_max
        assert (pause_s == 0) is (crashes == 1)


def test_crashes_of_long_ago_do_not_count():
    history = backoff.CrashHistory(backoff.BackoffPolicy(crashes_max=4, window_s=60))
    pauses = [history.crashed(at_s) for at_s in (0.0, 10.0, 65.0, 70.0)]
    assert None not in pauses
    assert history.count == 3
    assert history.crashed(70.0) is None


async def test_a_broker_dies_with_the_process_that_started_it(tmp_path, start_process):
    script = """
        import asyncio, sys
        from pathlib import Path
        from muster.bus.brokers import broker, config
        async def main():
            async with broker.Broker(config.BrokerConfig(name="one", directory=Path(sys.argv[1]))) as one:
                print("pid", one.pid, flush=True)
                await asyncio.sleep(60)
        asyncio.run(main())
    """
    child = await start_process(sys.executable, "-c", textwrap.dedent(script), tmp_path / "one")
    pid = int((await child.line(r"pid (\d+)"))[1])
    assert is_server(pid)
    await child.kill()
    await eventually(lambda: not is_server(pid))


def is_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"nats-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


async def test_ctrl_c_in_the_terminal_does_not_reach_the_broker(settings):
    async with broker.Broker(settings) as server:
        assert server.pid
        assert os.getpgid(server.pid) != os.getpgid(0)


async def test_a_broker_that_does_not_listen_to_reason_is_killed(settings):
    async with asyncio.timeout(30):
        async with broker.Broker(settings) as server:
            assert server.pid
            os.kill(server.pid, signal.SIGSTOP)
            await server.stop(timeout_s=0.1)
            assert server.pid is None


# Frozen brokers: the process runs, but does not reply


async def test_a_frozen_broker_is_killed_and_restarted(settings, monkeypatch):
    monkeypatch.setattr(broker, "PROBE_POLICY", dataclasses.replace(broker.PROBE_POLICY, period_s=0.05))
    monkeypatch.setattr(monitor, "SILENT_S", 0.3)
    monkeypatch.setattr(monitor, "CONFIRM_S", 0.2)
    async with broker.Broker(settings) as server:
        frozen = server.pid
        assert frozen
        os.kill(frozen, signal.SIGSTOP)
        await eventually(lambda: server.restarts == 1 and server.state is broker.BrokerState.RUNNING)
        assert server.pid != frozen
        assert (await server.health()).ok
        assert isinstance(server.failure, diagnosis.BrokerFailed)
        assert server.failure.fault is Fault.SILENT
        assert "did not reply for 0.5 s and was killed" in server.failure.message


async def test_a_frozen_broker_is_reported_before_it_is_killed(settings):
    async with broker.Broker(settings) as server:
        assert await server.problem() is None
        assert server.pid
        os.kill(server.pid, signal.SIGSTOP)
        status = Path(f"/proc/{server.pid}/stat")
        await eventually(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")
        problem = await server.problem()
        assert isinstance(problem, diagnosis.BrokerFailed)
        assert problem.fault is Fault.SILENT
        assert "runs, but does not reply" in problem.message
        await server.kill()  # it would not end before it is killed anyway


async def test_a_request_that_cannot_be_sent_is_no_sign_of_a_frozen_broker(settings, monkeypatch):
    """Such as one for which this process has no file descriptor left."""

    async def no_descriptor(*_: object, **__: object):
        raise OSError(errno.EMFILE, "Too many open files")

    async with broker.Broker(settings) as server:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "open_connection", no_descriptor)
            health = await server.health()
        assert not health.ok
        assert not health.silent


async def test_a_disk_that_is_gone_is_a_problem_and_no_crash(settings):
    problem = await broker.Broker(settings).problem()  # its folder does not exist
    assert isinstance(problem, diagnosis.BrokerFailed)
    assert problem.fault is Fault.UNWRITABLE
    assert str(settings.directory) in str(problem)
