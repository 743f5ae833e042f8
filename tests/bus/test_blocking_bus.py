"""The blocking bus: used from a plain thread while a real broker runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import muster
from muster import blocking, blocking_connection
from muster.bus import api
from muster.bus.brokers import broker as brokers
from muster.core import errors
from muster.core.telemetry import trace


async def test_messages_streams_and_keys(broker: brokers.Broker):
    def use(url: str) -> None:
        with muster.blocking.connect(url, identity="one") as bus, blocking.connect(url) as other:
            assert bus.identity == "one"
            assert bus.state is api.ConnectionState.CONNECTED
            with other.subscribe("news.*") as subscription:
                bus.publish("news.a", b"1", headers={"H": "x"})
                bus.publish("news.b", b"2")
                first = subscription.next(timeout_s=30)
                assert (first.subject, first.data, first.headers["H"]) == ("news.a", b"1", "x")
                assert [m.data for m in subscription.messages(timeout_s=1)] == [b"2"]
                with pytest.raises(errors.TimedOut):
                    subscription.next(timeout_s=0.05)
            with pytest.raises(errors.Unavailable):
                bus.request("nobody", b"")

            questions = other.subscribe("echo")
            server = threading.Thread(target=lambda: questions.next(timeout_s=30).respond(b"answer"))
            server.start()
            assert bus.request("echo", b"").data == b"answer"
            server.join()

            stream = bus.stream(api.StreamSettings("log", ("log.>",)))
            assert [stream.publish("log.a", b"%d" % n) for n in range(3)] == [1, 2, 3]
            assert stream.publish_batch([api.OutgoingMessage("log.b", b"")] * 2) == 5
            assert [m.sequence for m in stream.read(1)] == [1, 2, 3, 4, 5]
            assert bus.open_stream("log").get(2).data == b"1"
            assert stream.state().messages == 5
            with pytest.raises(errors.NotFound):
                list(stream.read(1, 99))

            bucket = bus.key_value(api.KeyValueSettings("b"))
            revision = bucket.create("k", b"1")
            bucket.update("k", b"2", revision=revision)
            with pytest.raises(errors.Conflict):
                bucket.update("k", b"3", revision=revision)
            entry = bucket.get("k")
            assert entry is not None
            assert entry.value == b"2"
            assert bucket.keys() == ["k"]
            bucket.delete("k")
            assert bucket.get("k") is None
        with pytest.raises(errors.NotConnected):
            bus.publish("news.a", b"")
        bus.close()

    await asyncio.to_thread(use, broker.url)


async def test_many_threads_share_one_connection_and_its_syncs(broker: brokers.Broker):
    def use(url: str) -> None:
        with blocking.connect(url) as bus:
            stream = bus.stream(api.StreamSettings("log", ("log.>",)))
            sequences: list[int] = []

            def publish() -> None:
                for _ in range(20):
                    sequences.append(stream.publish("log.a", b""))  # noqa: PERF401

            threads = [threading.Thread(target=publish) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(sequences) == list(range(1, 161))

    await asyncio.to_thread(use, broker.url)


async def test_the_trace_of_the_caller_goes_along(broker: brokers.Broker):
    here = trace.start(bytes(range(24)))

    def use(url: str) -> None:
        with blocking.connect(url) as bus, bus.subscribe("s") as subscription:
            trace.current.set(here)
            bus.publish("s", b"")
            assert subscription.next(timeout_s=30).trace == here

    await asyncio.to_thread(use, broker.url)


def test_without_a_broker_the_connection_fails():
    with pytest.raises(errors.NotConnected):
        blocking.connect("nats://127.0.0.1:1")
    assert not [thread for thread in threading.enumerate() if thread.name == "muster-blocking"]


def test_a_task_that_exits_ends_its_call_and_not_the_loop_of_all():
    async def leave() -> None:
        sys.exit(3)

    loop = blocking_connection.EventLoopThread()
    try:
        with pytest.raises(SystemExit):
            loop.wait(leave())
        assert loop.wait(asyncio.sleep(0, "it runs")) == "it runs"
    finally:
        loop.stop()


def test_importing_muster_is_cheap():
    """`muster --help` must be quick: nothing of the engine is imported before it is used."""
    script = "import sys, muster; print([m for m in ('nats', 'cryptography', 'asyncio') if m in sys.modules])"
    here = {**os.environ, "PYTHONPATH": str(Path(muster.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=here
    )
    assert done.stdout.strip() == "[]"
