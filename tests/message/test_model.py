"""Messages under random operations and faults, compared with a model that only keeps accounts.

The real client and the real dispatcher run over the simulated network in virtual time.  The model does not
know how a queue works.  It knows what was sent, what an application was given, and what was confirmed to it,
and so what must be true of every message:

- one whose send was confirmed is delivered until its acknowledgement is confirmed, or it is purged;
- one whose acknowledgement was confirmed is not delivered again, and no second transaction commits it;
- one whose transaction was rolled back is never delivered;
- one that an application was given before is marked as redelivered when it comes again from the same queue;
  one that was moved to another queue is a new message there.

What was in doubt, because its caller gave up or no dispatcher answered, may have happened or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st

from muster.bus.memory import network, streams
from muster.core import errors
from muster.message import destinations, messages, partitions, protocol
from muster.message import errors as message_errors
from muster.message import settings as settings_
from muster.message.client import api
from muster.message.client import consumers as client_consumers
from muster.message.dispatcher import backlog_reader, leadership
from muster.message.dispatcher.log import message_cache
from muster.testing import virtual_clock

T = TypeVar("T")

JOBS = destinations.queue("jobs")
OTHER = destinations.queue("other")
NEWS = (destinations.topic("news/a"), destinations.topic("news/b"))
SETTINGS = settings_.MessageSettings(max_deliveries=0, checkpoint_records=10, connection_timeout_s=5)
STEP_S = 0.05
GIVE_UP_S = 100.0  # longer than anything waits for an answer


class Accounts:
    """The model. A message is known by its text; ``to`` is where it was sent."""

    def __init__(self) -> None:
        self.to: dict[str, str] = {}
        self.confirmed: set[str] = set()
        self.refused: set[str] = set()
        self.given: set[tuple[str, str]] = set()  # with the queue or topic
        self.finished: set[str] = set()
        self.in_doubt: set[str] = set()  # whether they are finished
        self.purged = 0
        self.purge_in_doubt = False

    def give(self, text: str, source: str, *, redelivered: bool) -> None:
        assert text in self.to, f"{text!r} was never sent"
        assert text not in self.finished, f"{text!r} was delivered after its acknowledgement was confirmed"
        assert text not in self.refused, f"{text!r} was delivered although its transaction was rolled back"
        if (text, source) in self.given:
            assert redelivered, f"{text!r} was delivered again and is not marked"
        self.given.add((text, source))

    def finish(self, texts: Sequence[str]) -> None:
        for text in texts:
            assert text not in self.finished, f"the acknowledgement of {text!r} was confirmed twice"
            self.finished.add(text)

    def check(self, left: list[str]) -> None:
        """``left``: what could be received in the end."""
        assert len(left) == len(set(left)), f"received twice: {sorted(left)}"
        assert not self.refused & {text for text, _ in self.given}, "delivered although rolled back"
        lost = self.confirmed - self.finished - self.in_doubt - set(left)
        if not self.purge_in_doubt:
            missing = {text for text in lost if self.to[text] == JOBS.name}
            assert not lost - missing, f"lost: {sorted(lost - missing)}"
            surely = len(missing)
            at_most = surely + len(self.in_doubt) + len(self.to.keys() - self.confirmed)
            assert surely <= self.purged <= at_most, (
                f"{self.purged} were purged, and {surely} are missing: {sorted(missing)}"
            )


class Application:
    """A session with its consumer, and what it was given since its last commit."""

    def __init__(self, accounts: Accounts, connection: api.Connection, mode: api.AcknowledgeMode) -> None:
        self._accounts = accounts
        self.connection = connection
        self.session = connection.session(mode)
        self.consumer: client_consumers.Consumer | None = None
        self.has: list[str] = []
        self.sends: list[str] = []
        self._last: messages.JmsMessage | None = None

    async def take(self, most: int, timeout_s: float = 0.0) -> int:
        count = 0
        while count < most and self.consumer is not None:
            try:
                message = await self.consumer.receive(timeout_s)
            except errors.MusterError:
                break
            if message is None:
                break
            count += 1
            text = str(message.body())
            self._accounts.give(text, self.consumer.destination.name, redelivered=message.redelivered)
            self.has.append(text)
            self._last = message
        return count

    async def commit(self) -> None:
        has, self.has, sends, self.sends = self.has, [], self.sends, []
        try:
            if self.session.transacted:
                await self.session.commit()
            elif self._last is not None:
                await self._last.acknowledge()
        except message_errors.TransactionRolledBack:
            self._accounts.refused.update(sends)
        except (errors.MusterError, asyncio.CancelledError) as error:
            self._accounts.in_doubt.update(has)
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            self._accounts.finish(has)
            self._accounts.confirmed.update(sends)

    async def roll_back(self) -> None:
        self.has.clear()
        self._accounts.refused.update(self.sends)
        self.sends.clear()
        with contextlib.suppress(errors.MusterError):
            await (self.session.rollback() if self.session.transacted else self.session.recover())


class World:
    """The system under test, and the faults that can be done to it."""

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.net = network.SimulatedNetwork(1)
        self.stored = asyncio.Event()  # what the dispatcher writes is stored while this is set
        self.stored.set()
        self.single = False  # of a slow disk: the next batch is stored, and then it is slow again
        self.refusals = 0  # so many of the next batches are refused for want of room,
        self.breaks = 0  # or stored, without the dispatcher hearing so
        self.under_way: set[asyncio.Task[None]] = set()
        self.errors: list[BaseException] = []
        self.texts = (f"{number}" for number in itertools.count())
        self.applications: list[Application] = []
        self._dispatchers = itertools.count()

    async def start(self) -> None:
        await self.start_dispatcher()
        self.senders = [api.Connection(await self.net.connect(f"sender-{each}")) for each in "ab"]
        self.admin = api.Connection(await self.net.connect("admin"))
        for name in ("one", "two"):
            connection = api.Connection(await self.net.connect(name))
            made = Application(self.accounts, connection, api.AcknowledgeMode.TRANSACTED)
            self.applications.append(made)
            made.consumer = await made.session.consumer(JOBS, prefetch=2)
        connection = api.Connection(await self.net.connect("reader"), client_id="reader")
        reader = Application(self.accounts, connection, api.AcknowledgeMode.CLIENT)
        reader.consumer = await reader.session.durable_consumer(
            destinations.topic("news/*"), "all", prefetch=2
        )
        self.applications.append(reader)

    async def start_dispatcher(self) -> None:
        self.bus = await self.net.connect(f"dispatcher-{next(self._dispatchers)}")
        self.dispatcher = leadership.DispatcherLeadership(self.bus, SETTINGS, lease_ttl_s=2)
        self.running = asyncio.ensure_future(self.dispatcher.run())

    async def kill_dispatcher(self) -> None:
        self.net.crash(self.bus)
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.start_dispatcher()

    def lose_connection(self, which: int) -> None:
        self.net.disconnect(self.applications[which].connection.bus)  # type: ignore[arg-type]

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self.under_way.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    async def store(
        self,
        store: Callable[..., Coroutine[Any, Any, int]],
        stream: streams.SimulatedStream,
        *args: Any,
        **more: Any,
    ) -> int:
        """In place of a stream's `publish_batch`."""
        if stream.name == partitions.stream(0):
            await self.stored.wait()
            if self.single:
                self.single = False
                self.stored.clear()
            if self.refusals:
                self.refusals -= 1
                raise errors.LimitExceeded("insufficient storage")
            if self.breaks:
                self.breaks -= 1
                await store(stream, *args, **more)
                raise errors.TimedOut("no acknowledgement came")
        return await store(stream, *args, **more)

    # What is sent.

    async def send(self, sender: int, to: Sequence[destinations.Destination], delay_s: float) -> None:
        """Each on its own, without waiting for the one before."""
        session = self.senders[sender].session()

        async def submit(destination: destinations.Destination) -> None:
            text = self._new(destination)
            with contextlib.suppress(errors.MusterError):
                await session.producer(destination, delay_s=delay_s).submit(text)
                self.accounts.confirmed.add(text)

        for destination in to:
            self.spawn(submit(destination))

    async def send_together(self, sender: int, to: Sequence[destinations.Destination]) -> None:
        """In one transaction."""
        made = Application(self.accounts, self.senders[sender], api.AcknowledgeMode.TRANSACTED)
        await self.send_in(made, to)
        self.spawn(made.commit())

    async def send_in(self, application: Application, to: Sequence[destinations.Destination]) -> None:
        for destination in to:
            text = self._new(destination)
            await application.session.producer(destination).send(text)
            application.sends.append(text)

    def _new(self, destination: destinations.Destination) -> str:
        text = f"{destination.name}:{next(self.texts)}"
        self.accounts.to[text] = destination.name
        return text

    # What is taken away.

    async def move(self, limit: int) -> None:
        with contextlib.suppress(errors.MusterError):
            await self.admin.request(protocol.MoveMessages(JOBS.name, to=str(OTHER), limit=limit))

    async def purge(self) -> None:
        try:
            count = (await self.admin.request(protocol.PurgeQueue(JOBS.name))).count
        except errors.MusterError:
            self.accounts.purge_in_doubt = True
        else:
            self.accounts.purged += count

    # The end.

    async def settle(self) -> None:
        """Everything works again: whatever was sent can be received, without anybody having to go."""
        self.stored.set()
        self.single = False
        self.refusals = self.breaks = 0
        if self.under_way:
            await asyncio.wait(self.under_way, timeout=GIVE_UP_S)
        assert not self.under_way, f"without an end: {self.under_way}"
        for application in self.applications:
            await application.roll_back()
        left: list[str] = []
        while sum([await self._drain(item, left) for item in self.applications]):
            pass
        rest = Application(self.accounts, self.admin, api.AcknowledgeMode.TRANSACTED)
        rest.consumer = await rest.session.consumer(OTHER)
        while await self._drain(rest, left):
            pass
        rows = (await self.admin.request(protocol.ListQueues())).queues
        assert all(not row.depth for row in rows), f"counted and not to be had: {rows}"
        self.accounts.check(left)

    async def _drain(self, application: Application, left: list[str]) -> int:
        count = await application.take(1000, timeout_s=8.0)
        left += application.has
        application.has.clear()
        if application.session.transacted:
            await application.session.commit()
        elif application._last is not None:
            await application._last.acknowledge()
        return count

    async def stop(self) -> None:
        self.stored.set()
        self.single = False
        self.refusals = self.breaks = 0
        for task in list(self.under_way):
            task.cancel()
        await asyncio.gather(*self.under_way, return_exceptions=True)
        for connection in [
            *self.senders,
            self.admin,
            *(application.connection for application in self.applications),
        ]:
            await connection.close()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


class Machine(stateful.RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._runner = asyncio.Runner(loop_factory=virtual_clock.VirtualLoop)
        loop = self._runner.get_loop()
        self._patch.setattr(time, "time_ns", lambda: virtual_clock.EPOCH_NS + round(loop.time() * 1e9))
        self.world = self._run(self._begin())

    async def _begin(self) -> World:
        world = World()
        plain = streams.SimulatedStream.publish_batch

        async def store(stream: streams.SimulatedStream, *args: Any, **more: Any) -> int:
            return await world.store(plain, stream, *args, **more)

        self._patch.setattr(streams.SimulatedStream, "publish_batch", store)
        # Some messages are in memory when they are delivered, and others are read from the log.
        self._patch.setattr(message_cache, "LAST_MAX", 4)
        self._patch.setattr(backlog_reader, "READ_AHEAD", 3)
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
        """Begin it; whoever is not patient stops waiting for it."""
        task = self.world.spawn(work)
        if patience_s is not None:
            asyncio.get_running_loop().call_later(patience_s, task.cancel)

    senders = st.integers(0, 1)
    consumers = st.integers(0, 1)
    somewhere = st.lists(st.sampled_from([JOBS, JOBS, *NEWS]), min_size=1, max_size=6)
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
        self._do(self.world.send_together(sender, [NEWS[each % 2] for each in range(count)]))

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

    @stateful.rule(which=consumers, to=st.lists(st.just(OTHER), max_size=1), patience_s=patience)
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
            await self.world.send(0, [JOBS] * count, 0.0)
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


def test_the_accounts_of_messages_hold_under_faults():
    stateful.run_state_machine_as_test(Machine, settings=quick)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_accounts_of_messages_hold_for_long():
    many = settings(quick, max_examples=3000, stateful_step_count=50, derandomize=False, print_blob=True)
    stateful.run_state_machine_as_test(Machine, settings=many)
