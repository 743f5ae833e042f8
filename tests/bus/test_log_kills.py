"""The broker of an owned log is killed at each of its requests, before or after it has carried it out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import pytest

from muster.bus import api
from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config
from muster.bus.client import client
from muster.bus.log import journal, owned_log, pages
from muster.core import errors
from tests.bus import keyed_state

STREAM = api.StreamSettings("logs", subjects=("log.>",), max_bytes=1 << 30, max_age_s=0, allow_delete=True)
NAME = "log.registry"
LARGE = b"x" * 1_500
STEPS: list[tuple[bytes, bytes | None]] = [
    (b"a", b"1"),
    (b"large", LARGE),
    *((b"hot", b"%d" % (number % 10) * 500) for number in range(20)),  # which are trimmed
    (b"a", None),
    (b"large", LARGE + b"2"),
    (b"b", b"2"),
]


class KilledStream:
    """A stream whose broker is killed at one request: ``at``, counted from 0."""

    def __init__(self, stream: api.Stream, broker: brokers.Broker, at: int, *, before: bool) -> None:
        self._stream = stream
        self._broker = broker
        self._at = at
        self._before = before
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def publish(self, *arguments: Any, **options: Any) -> Any:
        return await self._killed(self._stream.publish(*arguments, **options))

    async def purge(self, **options: Any) -> Any:
        return await self._killed(self._stream.purge(**options))

    async def _killed(self, request: Any) -> Any:
        number, self.requests = self.requests, self.requests + 1
        if number != self._at:
            return await request
        sent = asyncio.ensure_future(request)
        if not self._before:
            await asyncio.wait([sent])
        await self._broker.kill()
        await self._broker.start()
        if self._before:
            return await sent
        raise errors.TimedOut("the reply was lost")


async def carry_out(stream: Any, epochs: itertools.count[int]) -> dict[bytes, bytes]:
    """Append all, with a new owner and the same request id after each doubt; what a reader then has."""
    log: owned_log.OwnedLog | None = None
    for number, change in enumerate(STEPS):
        while True:
            try:
                if log is None:
                    log = owned_log.OwnedLog(stream, NAME, keyed_state.KeyedState())
                    await log.start()
                if not log.is_owned:
                    await log.own(next(epochs))
                await log.append([change], request=f"r{number}")
                break
            except errors.Unavailable:
                if log is not None and not log.is_owned:
                    await log.stop()
                    log = None
    assert log is not None
    await log.stop()
    state = keyed_state.KeyedState()
    reader = owned_log.OwnedLog(stream, NAME, state)
    await reader.start()
    await reader.stop()
    for number in range(len(STEPS)):
        assert reader.executed(f"r{number}") is not None
    return {key: record.value for key, record in state.records.items()}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_BYTES", 1_000)
    monkeypatch.setattr(journal, "TRIM_BYTES_MIN", 2_000)
    monkeypatch.setattr(owned_log, "PURGE_PAGES", 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
async def test_each_append_is_stored_once_whenever_the_broker_is_killed(tmp_path, before: bool):
    expected: dict[bytes, bytes] = {}
    for key, value in STEPS:
        expected.pop(key, None)
        if value is not None:
            expected[key] = value
    for at in itertools.count():
        settings = config.BrokerConfig(name="b", directory=tmp_path / f"{at}")
        async with brokers.Broker(settings) as broker, contextlib.AsyncExitStack() as stack:
            bus = await stack.enter_async_context(
                await client.connect([broker.url], identity="owner", audit_s=0)
            )
            stream = KilledStream(await bus.stream(STREAM), broker, at, before=before)
            async with asyncio.timeout(60):
                assert await carry_out(stream, itertools.count(1)) == expected, f"killed at request {at}"
            if stream.requests <= at:
                break
    assert at > 20
