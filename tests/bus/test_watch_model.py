"""Key/value watches against a naive model, over the simulated network.

Whatever happened to keys, markers, connections and watchers: once everything is connected again, a watcher
knows what the bucket holds, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from muster.bus import api
from muster.bus.memory import network
from muster.bus.streams import key_value
from muster.testing import virtual_clock

SETTINGS = api.KeyValueSettings("b")
KEYS = st.sampled_from(["a", "b", "c.1", "c.2", "d"])
VALUES = st.binary(max_size=3)
# A fraction, so that no key expires at the moment of a comparison.
SPANS_S = st.sampled_from([0.003, 0.31, 5.31, key_value.EXPIRY_MARKER_TTL_S + 1.31])


class Watches(stateful.RuleBasedStateMachine):
    @stateful.initialize(seed=st.integers(0, 2**16), there=st.dictionaries(KEYS, VALUES))
    def start(self, seed: int, there: dict[str, bytes]) -> None:
        self.loop = virtual_clock.VirtualLoop()
        self.net = network.SimulatedNetwork(seed)
        self.model: dict[str, tuple[bytes, float]] = {}  # key: value, and when it expires
        self.readers = 0
        self.run(self._start(there))

    async def _start(self, there: dict[str, bytes]) -> None:
        self.writer = await self.net.connect("writer")
        self.bucket = await self.writer.key_value(SETTINGS)
        for key, value in there.items():
            await self._put(key, value, None)
        await self._begin()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)

    async def _begin(self) -> None:
        """A new reader, with a watch and a view of its own."""
        self.readers += 1
        self.view: dict[str, bytes] = {}
        self.revisions: dict[str, int] = {}
        self.ends_of_replay = 0
        self.reader = await self.net.connect(f"reader-{self.readers}")
        self.watching = asyncio.create_task(self._watch(await self.reader.key_value(SETTINGS)))

    async def _watch(self, bucket: api.KeyValue) -> None:
        async with await bucket.watch() as watch:
            async for entry in watch:
                if entry is None:
                    self.ends_of_replay += 1
                    continue
                assert entry.revision >= self.revisions.get(entry.key, 0), "changes of a key are in order"
                self.revisions[entry.key] = entry.revision
                if entry.value is None:
                    self.view.pop(entry.key, None)
                else:
                    self.view[entry.key] = entry.value

    @stateful.rule(key=KEYS, value=VALUES, ttl_s=st.sampled_from([None, 1, 3, 100]))
    def put(self, key: str, value: bytes, ttl_s: int | None) -> None:
        self.run(self._put(key, value, ttl_s))

    async def _put(self, key: str, value: bytes, ttl_s: int | None) -> None:
        await self.bucket.put(key, value, ttl_s=ttl_s)
        self.model[key] = (value, float("inf") if ttl_s is None else self.loop.time() + ttl_s)

    @stateful.rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.run(self.bucket.delete(key))
        self.model.pop(key, None)

    @stateful.rule(key=KEYS)
    def purge(self, key: str) -> None:
        """The key goes and leaves no marker."""
        self.run(self._purge(key))
        self.model.pop(key, None)
        # A connected watcher is not informed: it learns of it over its next connection.
        self.disconnect()

    async def _purge(self, key: str) -> None:
        await (await self.writer.open_stream("KV_b")).purge(subject=f"$KV.b.{key}")

    @stateful.rule(span_s=SPANS_S)
    def wait(self, span_s: float) -> None:
        self.run(asyncio.sleep(span_s))

    @stateful.rule()
    def disconnect(self) -> None:
        if self.reader.state is api.ConnectionState.CONNECTED:
            self.run(self._disconnect())

    async def _disconnect(self) -> None:
        self.net.disconnect(self.reader)

    @stateful.rule(span_s=SPANS_S)
    def absence(self, span_s: float) -> None:
        self.run(self._absence(span_s))

    async def _absence(self, span_s: float) -> None:
        self.net.unplug(self.reader.node)
        await asyncio.sleep(span_s)

    @stateful.rule(deleted=st.lists(KEYS, max_size=6))
    def crash(self, deleted: list[str]) -> None:
        """Another reader takes its place, while keys are deleted."""
        self.run(self._crash())
        for key in deleted:
            self.delete(key)

    async def _crash(self) -> None:
        await self._end()
        self.net.crash(self.reader)
        await self._begin()

    async def _end(self) -> None:
        self.watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.watching

    @stateful.rule()
    def compare(self) -> None:
        self.run(self._compare())

    async def _compare(self) -> None:
        self.net.heal()
        await asyncio.sleep(
            network.NetworkFaults().silence_s + 20.31
        )  # whatever was under way has been settled
        assert not self.watching.done(), self.watching
        now = self.loop.time()
        expected = {key: value for key, (value, until) in self.model.items() if now < until}
        assert await self.bucket.keys() == sorted(expected)
        assert self.view == expected
        assert self.ends_of_replay == 1

    def teardown(self) -> None:
        try:
            self.compare()
        finally:
            self.run(self._end())
            self.run(self.writer.close())
            self.loop.close()


TestWatches = Watches.TestCase
TestWatches.settings = hypothesis.settings(
    max_examples=100, stateful_step_count=20, deadline=None, derandomize=True
)
