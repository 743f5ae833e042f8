"""The system under test of `test_model`, the faults that can be done to it, and the model's accounts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from muster.bus.memory import connection as memory_connection
from muster.bus.memory import network, streams
from muster.core import errors
from muster.message import destinations, messages, partitions, protocol, settings
from muster.message import errors as message_errors
from muster.message.client import api, consumers
from muster.message.dispatcher import leadership

JOBS = destinations.queue("jobs")
OTHER = destinations.queue("other")
NEWS = (destinations.topic("news/a"), destinations.topic("news/b"))
FLASH = destinations.topic("flash")  # without durable subscriptions
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
        self.consumers: list[consumers.Consumer] = []
        self.has: list[str] = []
        self.sends: list[str] = []
        self._last: messages.JmsMessage | None = None

    async def take(self, most: int, timeout_s: float = 0.0) -> int:
        count = 0
        for consumer in self.consumers:
            while count < most:
                try:
                    message = await consumer.receive(timeout_s)
                except errors.MusterError:
                    break
                if message is None:
                    break
                count += 1
                text = str(message.body())
                self._accounts.give(text, consumer.destination.name, redelivered=message.redelivered)
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


class LossyNetwork(network.SimulatedNetwork):
    """Loses the next ``deliveries_to_lose`` deliveries, while all processes stay connected."""

    deliveries_to_lose = 0

    def _pass_on(
        self, ear: memory_connection.SimulatedSubscription, message: memory_connection.SimulatedMessage
    ) -> None:
        if self.deliveries_to_lose and ".deliver." in message.subject:
            self.deliveries_to_lose -= 1
        else:
            super()._pass_on(ear, message)


class DispatcherWorld:
    """The system under test, and the faults that can be done to it."""

    def __init__(self, partition_count: int) -> None:
        self._settings = settings.MessageSettings(
            max_deliveries=0, checkpoint_records=10, connection_timeout_s=5, partitions=partition_count
        )
        self.accounts = Accounts()
        self.net = LossyNetwork(1)
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
        users = await self.net.connect("users")  # these connections share their works
        self.senders = [api.Connection(users) for _ in range(2)]
        self.admin = api.Connection(await self.net.connect("admin"))
        for name in ("one", "two"):
            connection = api.Connection(users if name == "one" else await self.net.connect(name))
            made = Application(self.accounts, connection, api.AcknowledgeMode.TRANSACTED)
            self.applications.append(made)
            made.consumers.append(await made.session.consumer(JOBS, prefetch=2))
            if self._settings.partitions > 1 and name == "two":  # it acknowledges messages of two partitions
                made.consumers.append(await made.session.consumer(OTHER, prefetch=2))
        connection = api.Connection(users, client_id="reader")
        reader = Application(self.accounts, connection, api.AcknowledgeMode.CLIENT)
        news = destinations.topic("news/*")
        reader.consumers.append(await reader.session.durable_consumer(news, "all", prefetch=2))
        self.applications.append(reader)
        self.listener = api.Connection(await self.net.connect("listener"))
        self.hearing = await self.listener.session().consumer(FLASH)
        self.quiet = api.Connection(await self.net.connect("quiet"))
        await self.quiet.session().consumer(FLASH, no_local=True)

    async def start_dispatcher(self) -> None:
        self.bus = await self.net.connect(f"dispatcher-{next(self._dispatchers)}")
        self.dispatcher = leadership.DispatcherLeadership(self.bus, self._settings, lease_ttl_s=2)
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
        if stream.name.startswith(partitions.stream(0)):
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

    async def flash(self, count: int, delay_s: float) -> None:
        """Delayed messages to a subscriber that is not durable and stays connected: it receives them all.

        Nothing is sent while a fault lasts. That is no precondition of the rule: when a fault is over depends
        on the order of random names, and Hypothesis expects to draw the same again.
        """
        if not self.stored.is_set() or self.refusals or self.breaks or self.net.deliveries_to_lose:
            return
        producer = self.quiet.session().producer(FLASH, delay_s=delay_s)
        texts = [f"flash:{next(self.texts)}" for _ in range(count)]
        results = await asyncio.gather(*map(producer.send, texts), return_exceptions=True)
        missing = {text for text, result in zip(texts, results, strict=True) if result is None}
        while missing:
            message = await self.hearing.receive(GIVE_UP_S)
            assert message is not None, f"not published: {sorted(missing)}"
            missing.discard(str(message.body()))

    # What is taken away.

    async def move(self, limit: int) -> None:
        with contextlib.suppress(errors.MusterError):
            await self.admin.request(protocol.MoveMessages(JOBS.name, to=str(OTHER), limit=limit))

    async def purge(self) -> None:
        try:
            count = (await self.admin.request(protocol.PurgeQueue(JOBS.name))).count
        except errors.NotFound:  # nothing was sent to it yet
            return
        except errors.MusterError:
            self.accounts.purge_in_doubt = True
        else:
            self.accounts.purged += count

    # The end.

    async def settle(self) -> None:
        """All faults are over: every message can be received, and no client has to reconnect."""
        self.stored.set()
        self.single = False
        self.refusals = self.breaks = self.net.deliveries_to_lose = 0
        if self.under_way:
            await asyncio.wait(self.under_way, timeout=GIVE_UP_S)
        assert not self.under_way, f"without an end: {self.under_way}"
        for application in self.applications:
            await application.roll_back()
        left: list[str] = []
        while sum([await self._drain(item, left) for item in self.applications]):
            pass
        rest = Application(self.accounts, self.admin, api.AcknowledgeMode.TRANSACTED)
        rest.consumers.append(await rest.session.consumer(OTHER))
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
        self.refusals = self.breaks = self.net.deliveries_to_lose = 0
        for task in list(self.under_way):
            task.cancel()
        await asyncio.gather(*self.under_way, return_exceptions=True)
        for connection in [
            *self.senders,
            self.admin,
            self.listener,
            self.quiet,
            *(application.connection for application in self.applications),
        ]:
            await connection.close()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
