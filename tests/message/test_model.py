"""Messages under random operations and faults, compared with a model that only keeps accounts.

The real client and the real dispatcher run over the simulated network in virtual time.  The model does not
know how a queue works.  It knows what was sent, what an application was given, and what was confirmed to it,
and so what must be true of every message:

- one whose send was confirmed is delivered until its acknowledgement is confirmed, or it is purged;
- one whose acknowledgement was confirmed is not delivered again, and no second transaction commits it;
- one whose transaction was rolled back is never delivered;
- a delayed one reaches each subscriber of its topic that is connected when it is due;
- one that an application was given before is marked as redelivered when it comes again from the same queue;
  one that was moved to another queue is a new message there.

What was in doubt, because its caller gave up or no dispatcher answered, may have happened or not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st

from muster.bus.memory import streams
from muster.message import destinations
from muster.message.dispatcher import backlog_reader, dispatcher
from muster.message.dispatcher.log import compaction, message_cache
from muster.testing import virtual_clock
from tests.message import model_world

T = TypeVar("T")

STEP_S = 0.05


class MessageModel(stateful.RuleBasedStateMachine):
    partition_count = 1

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._runner = asyncio.Runner(loop_factory=virtual_clock.VirtualLoop)
        loop = self._runner.get_loop()
        self._patch.setattr(time, "time_ns", lambda: virtual_clock.EPOCH_NS + round(loop.time() * 1e9))
        self.world = self._run(self._begin())

    async def _begin(self) -> model_world.DispatcherWorld:
        world = model_world.DispatcherWorld(self.partition_count)
        plain = streams.SimulatedStream.publish_batch

        async def store(stream: streams.SimulatedStream, *args: Any, **more: Any) -> int:
            return await world.store(plain, stream, *args, **more)

        self._patch.setattr(streams.SimulatedStream, "publish_batch", store)
        # Some messages are in memory when they are delivered, and others are read from the log.
        self._patch.setattr(message_cache, "LAST_MAX", 4)
        self._patch.setattr(backlog_reader, "READ_AHEAD", 3)
        # The log is packed every second, even pages of which nearly everything is needed.
        self._patch.setattr(dispatcher.Dispatcher, "_is_crowded", lambda _: True)
        self._patch.setattr(compaction, "DENSE", 1)
        await world.start()
        return world

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def _do(self, work: Coroutine[Any, Any, None], *, step_s: float = STEP_S) -> None:
        async def run() -> None:
            await work
            await asyncio.sleep(step_s)

        self._run(run())
        if self.world.errors:
            raise self.world.errors[0]

    async def _begin_work(self, work: Coroutine[Any, Any, None], patience_s: float | None) -> None:
        """Begin it; a caller with a short timeout stops waiting for it."""
        task = self.world.spawn(work)
        if patience_s is not None:
            asyncio.get_running_loop().call_later(patience_s, task.cancel)

    senders = st.integers(0, 1)
    consumers = st.integers(0, 1)
    somewhere = st.lists(
        st.sampled_from([model_world.JOBS, model_world.JOBS, *model_world.NEWS]), min_size=1, max_size=6
    )
    patience = st.sampled_from([None, None, 0.0, 0.001, 0.002, 0.004])
    lags = st.sampled_from([0.0, 0.002, 0.004, 0.006, 0.008])

    @stateful.rule(sender=senders, to=somewhere, delay_s=st.sampled_from([0.0, 0.0, 0.02, 0.1]))
    def send(self, sender: int, to: list[destinations.Destination], delay_s: float) -> None:
        self._do(self.world.send(sender, to, delay_s))

    @stateful.rule(sender=senders, to=somewhere)
    def send_together(self, sender: int, to: list[destinations.Destination]) -> None:
        self._do(self.world.send_together(sender, to))

    @stateful.rule(sender=senders, count=st.integers(2, 12))
    def send_news_together(self, sender: int, count: int) -> None:
        self._do(self.world.send_together(sender, [model_world.NEWS[each % 2] for each in range(count)]))

    @stateful.rule(count=st.integers(1, 4), delay_s=st.sampled_from([0.0006, 0.1]))
    def flash(self, count: int, delay_s: float) -> None:
        self._do(self.world.flash(count, delay_s))

    @stateful.rule(which=consumers, most=st.integers(1, 4))
    def receive(self, which: int, most: int) -> None:
        async def take() -> None:
            await self.world.applications[which].take(most)

        self._do(take())

    @stateful.rule(most=st.integers(1, 8))
    def read_news(self, most: int) -> None:
        async def take() -> None:
            reader = self.world.applications[2]
            await reader.take(most, timeout_s=STEP_S)
            self.world.spawn(reader.commit())

        self._do(take())

    @stateful.rule(which=consumers, to=st.lists(st.just(model_world.OTHER), max_size=1), patience_s=patience)
    def commit(self, which: int, to: list[destinations.Destination], patience_s: float | None) -> None:
        self._do(self._commit(which, to, patience_s))

    @stateful.rule(which=consumers)
    def fail_over(self, which: int) -> None:
        """An application's connection breaks while its commit is being stored, and the other one goes on."""

        async def fail_over() -> None:
            self.world.stored.clear()
            await self._commit(which, [], None)
            await asyncio.sleep(STEP_S)
            self.world.lose_connection(which)
            await asyncio.sleep(STEP_S)
            await self.world.applications[1 - which].take(2)
            await self._commit(1 - which, [], None)

        self._do(fail_over())

    async def _commit(self, which: int, to: list[destinations.Destination], patience_s: float | None) -> None:
        await self.world.send_in(self.world.applications[which], to)
        await self._begin_work(self.world.applications[which].commit(), patience_s)

    @stateful.rule(which=st.integers(0, 2), patience_s=patience)
    def roll_back(self, which: int, patience_s: float | None) -> None:
        self._do(self._begin_work(self.world.applications[which].roll_back(), patience_s))

    @stateful.rule(limit=st.integers(1, 8))
    def move(self, limit: int) -> None:
        self._do(self._begin_work(self.world.move(limit), None))

    @stateful.rule()
    def purge(self) -> None:
        self._do(self._begin_work(self.world.purge(), None))

    @stateful.rule(which=consumers, count=st.integers(6, 12), limit=st.integers(6, 12), lag_s=lags)
    def consume_during_a_move(self, which: int, count: int, limit: int, lag_s: float) -> None:
        """An application commits while it is being stored that later messages are moved, and continues."""
        application = self.world.applications[which]

        async def take() -> None:
            for _ in range(2):
                await application.take(2)
                await asyncio.sleep(STEP_S)

        async def consume() -> None:
            await self.world.send(0, [model_world.JOBS] * count, 0.0)
            await asyncio.sleep(STEP_S)
            await take()
            self.world.stored.clear()
            await self._begin_work(self.world.move(limit), None)
            await asyncio.sleep(lag_s)
            await self._commit(which, [], None)
            await asyncio.sleep(STEP_S)
            self.world.single = True
            self.world.stored.set()
            await asyncio.sleep(STEP_S)
            await take()
            await self._commit(which, [], None)
            await asyncio.sleep(STEP_S)
            self.world.single = False
            self.world.stored.set()

        self._do(consume())

    # Faults.

    @stateful.precondition(lambda self: self.world.stored.is_set())
    @stateful.rule()
    def slow_disk(self) -> None:
        self.world.stored.clear()

    @stateful.precondition(lambda self: not self.world.stored.is_set())
    @stateful.rule()
    def quick_disk(self) -> None:
        self.world.stored.set()
        self._do(asyncio.sleep(0))

    @stateful.rule(times=st.integers(1, 3))
    def full_disk(self, times: int) -> None:
        self.world.refusals = times

    @stateful.rule()
    def lost_acknowledgement(self) -> None:
        self.world.breaks = 1

    @stateful.rule(count=st.integers(1, 2))
    def lose_deliveries(self, count: int) -> None:
        self.world.net.deliveries_to_lose = count

    @stateful.rule(which=st.integers(0, 2))
    def lose_connection(self, which: int) -> None:
        async def lose() -> None:
            self.world.lose_connection(which)

        self._do(lose())

    @stateful.rule()
    def kill_dispatcher(self) -> None:
        self._do(self.world.kill_dispatcher())

    @stateful.rule(for_s=st.sampled_from([0.02, 0.2, 1.5, 6.0]))
    def wait(self, for_s: float) -> None:
        self._do(asyncio.sleep(for_s))

    def teardown(self) -> None:
        try:
            if not self.world.errors:
                self._do(self.world.settle())
        finally:
            self._run(self.world.stop())
            self._runner.close()
            self._patch.undo()


quick = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class PartitionedMachine(MessageModel):
    """The queues are in different partitions, and transactions concern both."""

    partition_count = 2


@pytest.mark.parametrize("machine", [MessageModel, PartitionedMachine])
def test_the_accounts_of_messages_hold_under_faults(machine: type[MessageModel]):
    stateful.run_state_machine_as_test(machine, settings=quick)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # 900 s alone on a machine, and this one may be busy
@pytest.mark.parametrize("machine", [MessageModel, PartitionedMachine])
def test_the_accounts_of_messages_hold_for_long(machine: type[MessageModel]):
    many = settings(quick, max_examples=3000, stateful_step_count=50, derandomize=False, print_blob=True)
    stateful.run_state_machine_as_test(machine, settings=many)
