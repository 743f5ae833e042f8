"""A JMS connection: one connection to the bus, one name at the dispatcher, and what is on its way.

What its sessions send and acknowledge at one time becomes one `protocol.Work`, and one is under way at a
time: order is kept, and concurrent senders share a sync.  A work whose answer does not come is repeated with
the same id, to this dispatcher or the next one.  When a dispatcher begins, or does not know us, all
consumers attach anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, Self

from muster.bus import api
from muster.core import errors, log
from muster.message import faults, listening, protocol, slowing

events = log.Events("message")

PING_S = 4.0
ASK_S = 5.0
CLOSE_S = 3.0  # closing waits no longer than that for a dispatcher
IN_DOUBT_S = 60.0  # how long a work is repeated before its sender hears that it is in doubt
UNSENT_MAX = 20_000  # messages that senders may have waiting in one connection


class Fed(Protocol):
    """A consumer that the dispatcher feeds."""

    @property
    def number(self) -> int: ...
    def request(self) -> protocol.Attach: ...
    def deliver(self, delivery: protocol.Delivery) -> None: ...


class _Waiting:
    __slots__ = ("acks", "alone", "future", "sends")

    def __init__(
        self,
        sends: list[protocol.Send],
        acks: dict[str, list[int]],
        alone: bool,
        future: asyncio.Future[None],
    ) -> None:
        self.sends = sends
        self.acks = acks
        self.alone = alone
        self.future = future


class Connection:
    """``client_id`` names the client whose durable subscriptions these are; no two connections share one."""

    def __init__(self, bus: api.Bus, *, client_id: str | None = None, owns_bus: bool = False) -> None:
        self.bus = bus
        self.client_id = client_id
        self.name = secrets.token_hex(8)
        self.closed = False
        self.on_error: Callable[[errors.MusterError], None] | None = None
        self._owns_bus = owns_bus
        self._loop = asyncio.get_running_loop()
        self._known = False
        self._hello = asyncio.Lock()
        self._hearing: list[api.Subscription] = []
        self._greeted = False
        self._hears_slow = False
        self._consumers: dict[int, Fed] = {}
        self._attached: set[int] = set()
        self._numbers = 0
        self._message_number = 0
        self._id_head = f"ID:{self.name}-"
        self._waiting: deque[_Waiting] = deque()
        self._unsent = 0
        self._room = asyncio.Event()
        self._room.set()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._current: list[_Waiting] = []
        self._complaints = slowing.Complaints(self._complain, self.spawn)
        self.holds = slowing.Holds(self._ease)
        self.ears = listening.Ears(bus, listening.Heard)
        self.on_ease: Callable[[], None] | None = None

    @property
    def origin(self) -> str:
        """Whose messages these are, for those who do not want their own."""
        return self.client_id or self.name

    async def __aenter__(self) -> Self:
        try:
            if self.client_id is not None:
                await self.ask(protocol.Ping(self.name))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def on_close(self, closer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._closers.append(closer)

    async def close(self, *, lost: bool = False) -> None:
        """``lost``: whoever used it is gone, so what it held counts as delivered."""
        if self.closed:
            return
        for closer in reversed(self._closers):
            await closer()
        await self.idle(CLOSE_S)
        self.closed = True
        if self._known:
            with contextlib.suppress(errors.MusterError):
                await self._ask_once(protocol.Bye(self.name, lost))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in self._hearing:
            await one.close()
        if self._owns_bus:
            await self.bus.close()

    def check_open(self) -> None:
        if self.closed:
            raise faults.IllegalState("the connection is closed")

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def next_message_id(self) -> str:
        self._message_number += 1
        return f"{self._id_head}{self._message_number}"

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, errors.MusterError):
            self._report(error)
        else:
            self._loop.call_exception_handler(
                {"message": "a task of a JMS connection failed", "exception": error}
            )

    def _report(self, error: errors.MusterError) -> None:
        if self.on_error is not None:
            self.on_error(error)
        else:
            events.warning("connection-error", connection=self.name, error=error)

    # The dispatcher.

    async def greet(self) -> None:
        """Make ourselves known, and attach what is not attached."""
        async with self._hello:
            self.check_open()
            if not self._greeted:
                self._greeted = True
                deliver = protocol.deliver_subject(self.bus.identity, self.name)
                self._hearing.append(await self.bus.subscribe(deliver, handler=self._delivered))
                self._hearing.append(await self.bus.subscribe(protocol.BEGAN, handler=self._began))
                self.spawn(self._ping())
            if not self._known:
                at = self.bus.connection
                await self._ask_once(
                    protocol.Hello(
                        self.name,
                        self.client_id,
                        broker=at.broker if at else "",
                        number=at.number if at else 0,
                    )
                )
                self._known = True
                self._attached.clear()
            for number, consumer in list(self._consumers.items()):
                if number not in self._attached:
                    await self._ask_once(consumer.request())
                    self._attached.add(number)

    async def ask(self, asked: protocol.Ask, *, timeout_s: float = IN_DOUBT_S) -> protocol.Answer:
        """Ask until there is an answer: a dispatcher that dies has a successor."""
        deadline = self._loop.time() + timeout_s
        pause_s = 0.05
        while True:
            try:
                if not self._known:
                    await self.greet()
                return await self._ask_once(asked)
            except errors.Unavailable:
                if self.closed or self._loop.time() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)

    async def _ask_once(self, asked: protocol.Ask) -> protocol.Answer:
        subject = protocol.ask_subject(self.bus.identity)
        answered = await self.bus.request(subject, protocol.encode(asked), timeout_s=ASK_S)
        answer = protocol.decode_answer(answered.data)
        if answer.error is not None:
            error = faults.named(answer.error, answer.message)
            if isinstance(error, errors.NotConnected):
                self._known = False
            raise error
        return answer

    async def tell(self, said: protocol.Ask) -> None:
        if self._known:
            await self.bus.publish(protocol.tell_subject(self.bus.identity), protocol.encode(said))

    async def attach(self, consumer: Fed) -> None:
        self.check_open()
        if not self._known:
            await self._greet_patiently()
        self._consumers[consumer.number] = consumer
        try:
            await self.ask(consumer.request())
        except BaseException:
            self._consumers.pop(consumer.number, None)
            raise
        self._attached.add(consumer.number)

    async def _greet_patiently(self) -> None:
        """A domain that has just begun has no dispatcher yet."""
        await self.ask(protocol.Ping(self.name))

    async def detach(self, number: int, seen: dict[str, list[int]]) -> None:
        if self._consumers.pop(number, None) is not None:
            self._attached.discard(number)
            with contextlib.suppress(errors.Unavailable):
                await self.ask(protocol.Detach(self.name, number, seen), timeout_s=CLOSE_S)

    def _delivered(self, message: api.Message) -> None:
        for delivery in protocol.decode_deliveries(message.data).deliveries:
            if consumer := self._consumers.get(delivery.consumer):
                consumer.deliver(delivery)

    async def hear_slow(self) -> None:
        """From now on, wait for slow consumers of topics. Those who send say this first."""
        if not self._hears_slow:
            self._hears_slow = True
            self._hearing.append(await self.bus.subscribe(protocol.SLOW, handler=self._slow))

    def _slow(self, message: api.Message) -> None:
        self.holds.heard(protocol.decode_slow(message.data))

    def slow(self, consumer: slowing.Consumer) -> None:
        """This consumer of a topic cannot keep up."""
        self._complaints.add(consumer)

    async def _complain(self, topic: str, eased: bool) -> None:
        with contextlib.suppress(errors.Unavailable):
            if not self._known:
                await self.greet()
            await self.tell(protocol.Slow(self.name, topic, eased))

    def _ease(self) -> None:
        if self.on_ease is not None:
            self.on_ease()

    def _began(self, message: api.Message) -> None:
        self._known = False
        if not self.closed:
            self.spawn(self._greet_again())

    async def _greet_again(self) -> None:
        with contextlib.suppress(errors.Unavailable):  # the next ping tries again
            await self.ask(protocol.Ping(self.name), timeout_s=ASK_S)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            with contextlib.suppress(errors.Unavailable):
                await self.ask(protocol.Ping(self.name), timeout_s=PING_S)

    # Work.

    def submit(
        self, sends: list[protocol.Send], acks: dict[str, list[int]] | None = None, *, alone: bool = False
    ) -> asyncio.Future[None]:
        """Done when it is stored. ``alone``: a transaction, which shares its fate with nothing else."""
        self.check_open()
        if len(sends) > protocol.SENDS_MAX:
            raise errors.LimitExceeded(
                f"{len(sends)} messages in one transaction: the most is {protocol.SENDS_MAX}"
            )
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(_Waiting(sends, acks or {}, alone, future))
        self._unsent += len(sends)
        if self._unsent >= UNSENT_MAX:
            self._room.clear()
        if self._worker is None:
            self._worker = self.spawn(self._work())
        self._wake.set()
        return future

    async def room(self) -> None:
        """Back-pressure: waits while too much is on its way."""
        await self._room.wait()

    async def idle(self, timeout_s: float | None = None) -> None:
        """Until everything submitted is answered."""
        futures = [one.future for one in (*self._current, *self._waiting) if not one.future.done()]
        if futures:
            await asyncio.wait(futures, timeout=timeout_s)

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                taken = self._current = self._take()
                await self._carry_out(taken)

    def _take(self) -> list[_Waiting]:
        taken = [self._waiting.popleft()]
        size = len(taken[0].sends)
        total = sum(len(send.data) for send in taken[0].sends)
        while not taken[0].alone and self._waiting and not self._waiting[0].alone:
            size += len(self._waiting[0].sends)
            total += sum(len(send.data) + len(send.meta) for send in self._waiting[0].sends)
            if size > protocol.SENDS_MAX or total > 512 << 10:
                break
            taken.append(self._waiting.popleft())
        return taken

    async def _carry_out(self, taken: list[_Waiting]) -> None:
        acks: dict[str, list[int]] = {}
        for one in taken:
            for key, sequences in one.acks.items():
                acks.setdefault(key, []).extend(sequences)
        sends = [send for one in taken for send in one.sends]
        work = protocol.Work(self.name, secrets.token_hex(12), sends, acks, strict=taken[0].alone)
        error: errors.MusterError | None = None
        try:
            await self.ask(work)
        except errors.MusterError as found:
            error = found
        except BaseException:
            for one in taken:
                one.future.cancel()
            raise
        self._unsent -= len(sends)
        if self._unsent < UNSENT_MAX:
            self._room.set()
        for one in taken:
            if one.future.done():
                continue
            if error is None:
                one.future.set_result(None)
            else:
                one.future.set_exception(error)
                one.future.exception()  # a sender who does not wait has chosen not to hear
