"""The connection on the event loop of uvloop, whose transports are not those of asyncio."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import pytest

from muster.bus.brokers import broker, config
from muster.bus.client import client
from muster.bus.rpc import admission
from muster.testing.eventually import eventually
from muster.trust import certificates
from tests.bus import sockets

uvloop = pytest.importorskip("uvloop")


async def _use(url: str, tls: ssl.SSLContext | None) -> None:
    async with await client.connect([url], identity="ann", tls=tls, audit_s=0) as bus:
        await bus.subscribe("echo", handler=lambda message: message.respond(message.data))
        for size in (0, 10, 900_000):
            assert len((await bus.request("echo", bytes(size))).data) == size
        sockets.cut(bus)
        await eventually(lambda: bus.statistics().reconnects == 1)
        assert (await bus.request("echo", b"again")).data == b"again"


def _run(url: str, tls: ssl.SSLContext | None) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_use(url, tls))


@pytest.mark.may_leak("files", reason="libuv keeps a pipe for signals until the process ends")
@pytest.mark.parametrize("secure", [False, True])
async def test_requests_and_a_reconnection(tmp_path: Path, secure: bool):
    files = tls = None
    if secure:
        authority = certificates.CertificateStore.create(tmp_path / "pki", "fleet", lifetime_s=86400)
        authority.ensure("b", ("localhost", "127.0.0.1"))
        pair = authority.pair("b")
        files = config.BrokerTls(cert_file=pair.path, key_file=pair.path, ca_file=pair.bundle)
        tls = ssl.create_default_context(cafile=str(pair.bundle))
    settings = config.BrokerConfig(name="b", directory=tmp_path / "b", tls=files, storage=None)
    async with broker.Broker(settings) as running:
        await asyncio.to_thread(_run, running.url, tls)


@pytest.mark.may_leak("files", reason="libuv keeps a pipe for signals until the process ends")
def test_steps_shorter_than_the_resolution_of_its_clock_are_measured():
    """Requests have many of them, and their identity is charged for each."""

    async def measure_steps() -> float:
        slices, measured_ms = admission.of_loop(asyncio.get_running_loop()).slices, 0.0
        for _ in range(100):
            started_s, until_s = slices.start(), time.thread_time() + 0.0002
            while time.thread_time() < until_s:
                pass
            measured_ms += slices.stop("ann", started_s)
            await asyncio.sleep(0)
        return measured_ms

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(measure_steps()) >= 20
