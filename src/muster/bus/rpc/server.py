"""The server side: a table of operations, and the code that all of them share.

A handler is ``async def handler(call, **arguments)``.  Its annotated parameters are the declared type of the
request: arguments that do not fit are the caller's error, found before the handler runs; any other exception
in the handler is an internal error, logged and counted, and never reported as the caller's.

A request with an id (`requests.REQUEST_ID`) is executed once: a repetition waits for the first, or gets the
same reply. The stored replies (`answer_memory`) are bounded, and local to this process: after a failover a
repetition is a new request, unless the service has stored `RpcCall.request_id` with its effect.

Every operation that changes something leaves one record in the audit: done, refused, failed, or in doubt when
it was cancelled or timed out.  Exempt are writes whose own log names the writer (``audited=False``), and
refused requests beyond the budget of their identity, which are counted (`request_audit.Refusals`).
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import hashlib
import inspect
import types
import typing
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar, cast

import msgspec

from muster.bus import api, spans
from muster.bus.rpc import admission as admission_
from muster.bus.rpc import answer_memory, error_replies, origin, request_audit, requests
from muster.core import errors, messages, subjects
from muster.core.telemetry import log, trace
from muster.supervision import tasks

events = log.EventLog("rpc")

T = TypeVar("T")

PENDING_MAX = 1000  # requests under way or waiting, in one server
AUDIT_S = 5.0  # how long `close` waits for the records of cancelled requests
PAGE_ROWS = 200
PAGE_BYTES = 512 << 10  # of one page: half of the maximum message size

READ = "read"

OVERLOADED = {
    admission_.OverloadReason.RATE: errors.Throttled(
        "the requests of this identity use too much of the service",
        retry_after_s=admission_.RETRY_S,
        hint="send fewer or cheaper ones, or raise bus.share_per_identity",
    ),
    admission_.OverloadReason.PENDING: errors.Overloaded(
        "too many requests are under way", retry_after_s=admission_.RETRY_S
    ),
}


class RpcCall:
    """A request during its execution. A handler may add to its audit record."""

    def __init__(self, caller: requests.RpcCaller) -> None:
        self.identity = caller.identity
        self.operation = caller.operation
        self.message = caller.message
        self.request_id = caller.request_id
        self.on_behalf_of = ""  # set by an authorization function that accepts `claims_for`
        self.claims_for = caller.on_behalf_of
        self.target: str | None = None
        self.why = ""
        self.audited = True  # False: this one leaves no record after all
        self.outcome = messages.DecisionOutcome.DONE
        self.details: dict[str, str] = {}
        self.trace = trace.current.get()  # that of its audit record

    @property
    def actor(self) -> str:
        """The user for whom it is executed."""
        return self.on_behalf_of or self.identity


Handler = Callable[..., Awaitable[Any]]
Authorize = Callable[["RpcCall", "RpcOperation", Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class RpcOperation:
    """``name`` is the subject after the sender: ``request.apply``, ``read.list``, ``hello``, ``vouch.*``.

    ``audited``: None means that an operation which changes something is audited. ``what`` is its name in the
    audit log and ``target`` determines its target from the arguments. ``arguments`` is the declared type, if
    the parameters of the handler do not declare it (`arguments_of`). With ``decode`` the handler is called
    with its result, in place of keyword arguments. ``once``: False if a repetition has no effect, so that
    replies need not be stored. ``is_charged``: False for operations that only services may call, or that have
    a flow control of their own: they cost their identity nothing but their receipt (`admission`).
    """

    name: str
    handler: Handler
    audited: bool | None = None
    what: str = ""
    target: Callable[[Mapping[str, Any]], str] | None = None
    timeout_s: float | None = None
    decode: Callable[[bytes], Any] | None = None
    arguments: type[msgspec.Struct] | None = None
    once: bool = True
    is_charged: bool = True

    @classmethod
    def plain(cls, name: str, function: Handler, **options: Any) -> RpcOperation:
        """An operation of a function without the call: ``async def function(**arguments)``."""

        async def run(_: RpcCall, **arguments: Any) -> Any:
            return await function(**arguments)

        return cls(name, run, arguments=arguments_of(function, skip=0), **options)

    @functools.cached_property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @functools.cached_property
    def is_audited(self) -> bool:
        return self.kind != READ if self.audited is None else self.audited

    @functools.cached_property
    def _arguments(self) -> type[msgspec.Struct]:
        return self.arguments or arguments_of(self.handler)

    def parse(self, data: bytes) -> Any:
        if self.decode is not None:
            return self.decode(data)
        try:
            return msgspec.json.decode(data or b"{}", type=self._arguments)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise errors.InvalidInput(f"{self.name.rpartition('.')[2]}: {error}") from error

    async def run(self, call: RpcCall, request: Any) -> Any:
        if self.decode is not None:
            return await self.handler(call, request)
        return await self.handler(call, **fields_of(request))


def arguments_of(handler: Handler, *, skip: int = 1) -> type[msgspec.Struct]:
    """The type of a request, from the annotations of all parameters but the first ``skip``."""
    hints = typing.get_type_hints(handler, include_extras=True)
    fields: list[Any] = []
    for parameter in list(inspect.signature(handler).parameters.values())[skip:]:
        declared = (parameter.name, hints.get(parameter.name, Any))
        default = parameter.default
        fields.append(declared if default is inspect.Parameter.empty else (*declared, default))
    name = getattr(handler, "__name__", "Request").strip("_")
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def fields_of(request: Any) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


class RpcCodec(Protocol):
    """The form of replies."""

    def result(self, value: Any) -> bytes: ...
    def error(self, error: errors.MusterError) -> bytes: ...


class JsonCodec:
    def result(self, value: Any) -> bytes:
        return msgspec.json.encode({"result": value})

    def error(self, error: errors.MusterError) -> bytes:
        return msgspec.json.encode({"error": error_replies.to_error_reply(error)})


async def allow(call: RpcCall, operation: RpcOperation, arguments: Mapping[str, Any]) -> None:
    """The permissions of the broker are enough."""


class RpcServer:
    """``async with Server(bus, part, operations, …):`` serves them until it is left.

    ``at_once``: the number of requests that are executed concurrently; further ones wait, up to
    ``pending_max``, and beyond that are refused as overload. One identity may have half of them pending,
    and has its budget of the event loop (`admission`), so it cannot lock out all others.
    ``each_at_once``: of one identity, so that many that end at the same time do not delay those of
    others. While ``serving`` returns False requests are ignored, and callers retry; one that was accepted
    before, and then was not done because the service is unavailable, gets no reply. ``on_outcome`` is
    called with the outcome of each request, as `outcomes` counts them.
    """

    def __init__(
        self,
        bus: api.Bus,
        part: str,
        operations: Iterable[RpcOperation],
        *,
        audit: request_audit.RequestAudit | None = None,
        authorize: Authorize = allow,
        codec: RpcCodec | None = None,
        group: str | None = None,
        at_once: int | None = None,
        pending_max: int = PENDING_MAX,
        each_at_once: int | None = None,
        serving: Callable[[], bool] = lambda: True,
        on_outcome: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        # messages that were no (new) requests, or that were not admitted, by reason
        self.refused: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()  # of requests, by error code, or "done"
        self._bus = bus
        self._part = part
        self._operations = {operation.name: operation for operation in operations}
        self._audit = audit or request_audit.RequestAudit(bus, part)
        self._authorize = authorize
        self._codec: RpcCodec = codec or JsonCodec()
        self._group = group
        self._gate = asyncio.Semaphore(at_once) if at_once else contextlib.nullcontext()
        self._loop = loop = asyncio.get_running_loop()
        self._admission = admission_.of_loop(loop)
        self._slices = self._admission.slices
        # messages for the next turns, and requests for those of their identity to end
        self._held = admission_.IdentityQueues[tuple[api.Message, Callable[[api.Message], None]]](pending_max)
        self._waiting = admission_.IdentityQueues[tuple[requests.RpcCaller, RpcOperation]](pending_max)
        self._pending = admission_.PendingRequests(pending_max)
        self._each_at_once = each_at_once
        self._running: Counter[str] = Counter()  # requests by identity
        self._serving = serving
        self._on_outcome = on_outcome
        self._subscriptions: list[api.Subscription] = []
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order in which they began
        self._finishing: set[asyncio.Task[Any]] = set()  # done, and on their way to record and reply
        self._records: set[asyncio.Task[None]] = set()
        self._supervisor = tasks.TaskSupervisor(f"requests to {part}")
        self._answers = answer_memory.AnswerMemory()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        for suffix, operation in _patterns(self._operations):
            pattern = subjects.from_identity(self._part, "*", suffix)
            receive = self.in_turn(pattern, functools.partial(self._receive, pattern, operation))
            self._subscriptions.append(await self._bus.subscribe(pattern, handler=receive, group=self._group))

    async def close(self) -> None:
        """Cancel running requests; those with an unknown outcome are in the audit log when this returns.

        Requests that have been executed are still recorded and replied to.
        """
        while self._subscriptions:
            await self._subscriptions.pop().close()
        self._held.clear()
        self._waiting.clear()  # none of them has begun
        for task in self._tasks:
            if task not in self._finishing:
                task.cancel()
        for pending in (set(self._tasks), self._records):
            if pending:
                _, late = await asyncio.wait(pending, timeout=AUDIT_S)
                for task in late:
                    task.cancel()
        await self._audit.close()

    # Receiving.

    def _receive(self, pattern: str, operation: RpcOperation | None, message: api.Message) -> None:
        if not self._serving():
            return
        caller = requests.accept(message, pattern, self.refused, admit=self.admit)
        if caller is not None:
            self.submit(caller, operation or self._operations.get(caller.operation))

    def in_turn(self, pattern: str, handle: Callable[[api.Message], None]) -> Callable[[api.Message], None]:
        """The handler of a subscription to ``pattern``: it passes each message to ``handle``, in a later turn
        of the event loop if its identity has used its slice of this one. Until then nothing of it is read, so
        a thousand messages that arrive at once delay those behind them by little more than their transfer."""
        sender_of, slices, held = requests.sender_of, self._slices, self._held

        def receive(message: api.Message) -> None:
            identity = sender_of(pattern, message.subject)
            if not held:
                slices.note(identity, self._loop.time())
                if not slices.is_shared:
                    handle(message)
                elif slices.is_left(identity):
                    self._handle(identity, message, handle)
                else:
                    self._loop.call_soon(self._take_turn)
                    self._hold(identity, message, handle)
            elif identity not in held and slices.is_left(identity):
                self._handle(identity, message, handle)
            else:
                self._hold(identity, message, handle)

        return receive

    def _hold(self, identity: str, message: api.Message, handle: Callable[[api.Message], None]) -> None:
        if not self._held.add(identity, (message, handle), message.size):
            self._refuse_overload(identity, message, admission_.OverloadReason.PENDING)

    def _handle(self, identity: str, message: api.Message, handle: Callable[[api.Message], None]) -> None:
        started_s = self._slices.start()
        try:
            handle(message)
        finally:
            self._slices.stop(identity, started_s)

    def _take_turn(self) -> None:
        """Handle messages that have waited, for one slice in all; one of them also if others have used it."""
        try:
            while self._held:
                identity, (message, handle) = self._held.next()
                trace.current.set(message.trace)
                self._handle(identity, message, handle)
                if self._slices.total >= admission_.SLICE_MS:
                    break
        finally:
            if self._held:
                self._loop.call_soon(self._take_turn)

    def admit(self, identity: str, message: api.Message, *, is_charged: bool = True) -> bool:
        """For `requests.accept`: whether the identity may have another message handled now.

        Not ``is_charged``: of traffic with a flow control of its own; it is refused only for other costs.
        """
        now_s = self._loop.time()
        self._slices.note(identity, now_s)
        size = message.size
        if (
            self._admission.receive(identity, size, now_s)
            if is_charged
            else not self._admission.wait_s(identity, now_s)
        ):
            return True
        self._refuse_overload(identity, message, admission_.OverloadReason.RATE)
        return False

    def submit(
        self, caller: requests.RpcCaller, operation: RpcOperation | None, *, admitted: bool = False
    ) -> None:
        """Execute a request that was accepted by other code: a service with a fast path subscribes itself,
        passes `admit` to `requests.accept`, and submits requests that take longer. It need not start the
        server; None: there is no such operation. ``admitted``: the request has begun, so it is never refused
        as overload."""
        message = caller.message
        if operation is None:
            kind, _, name = caller.operation.partition(".")
            names = ", ".join(
                known.name.partition(".")[2] for known in self._operations.values() if known.kind == kind
            )
            unknown = errors.NotFound(f"no operation {name[:40]!r} to {kind}", hint=f"there are: {names}")
            self.charge(caller.identity, admission_.MALFORMED)
            self._refuse_now(message, unknown)
        elif not admitted and not self._pending.has_room(caller.identity, message.size):
            # A repetition is not refused: the request may still be executed, and it is answered then.
            if self._answers.get(caller.identity, caller.request_id) is not None:
                self.refused["repeated"] += 1
            else:
                self._refuse_overload(caller.identity, message, admission_.OverloadReason.PENDING)
        else:
            if operation.is_charged:
                self.charge(caller.identity, admission_.REQUEST)
            self._pending.begin(caller.identity, message.size)
            limit = self._each_at_once if operation.is_charged and not admitted else None
            if limit is not None and (
                caller.identity in self._waiting or self._running[caller.identity] >= limit
            ):
                self._waiting.add(caller.identity, (caller, operation))
            else:
                self._begin(caller, operation)

    def _begin(self, caller: requests.RpcCaller, operation: RpcOperation) -> None:
        identity = caller.identity
        begin = functools.partial(self._serve, caller, operation)
        work = metered(identity, begin) if operation.is_charged else begin()
        self._running[identity] += 1
        task = self._supervisor.spawn("request", work)
        self._tasks[task] = None
        task.add_done_callback(functools.partial(self._ended, identity, caller.message.size))

    def _ended(self, identity: str, size: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._finishing.discard(task)
        self._pending.end(identity, size)
        self._running[identity] -= 1
        if not self._running[identity]:
            del self._running[identity]
        self._begin_waiting(identity)

    def _begin_waiting(self, identity: str) -> None:
        """Begin the request of an identity that has waited longest, once the identity has a budget."""
        if identity not in self._waiting:
            return
        if wait_s := self._admission.wait_s(identity, self._loop.time()):
            self._loop.call_later(wait_s, self._begin_waiting, identity)
        else:
            self._begin(*self._waiting.next_of(identity))

    # Refusing, without a task.

    def measure(self, identity: str, work: Callable[[], object]) -> None:
        """Do ``work``, and charge the time that it takes."""
        started_s = self._slices.start()
        try:
            work()
        finally:
            self.charge(identity, self._slices.stop(identity, started_s))

    def charge(self, identity: str, cost: float) -> None:
        self._admission.charge(identity, cost, self._loop.time())

    def _refuse_overload(
        self, identity: str, message: api.Message, reason: admission_.OverloadReason
    ) -> None:
        requests.count_refusal(self._part, reason, self.refused)
        now_s = self._loop.time()
        if message.reply is not None and self._admission.may_answer(identity, now_s):
            self._refuse_now(message, OVERLOADED[reason])
        else:
            self._count(errors.Overloaded.code)

    def _refuse_now(self, message: api.Message, error: errors.MusterError) -> None:
        self._count(error.code)
        data = self._codec.error(error)
        if not message.respond_now(data):  # the connection waits for the broker: few replies are left to send
            task = self._supervisor.spawn("refusal", self._respond(message, data))
            self._records.add(task)
            task.add_done_callback(self._records.discard)

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self._on_outcome(outcome)

    @property
    def pending(self) -> int:
        """Requests under way or waiting."""
        return len(self._tasks) + len(self._waiting) + len(self._held)

    async def drain(self, timeout_s: float) -> None:
        """Wait for the running requests, up to this time."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    # Request ids.

    async def _serve(self, caller: requests.RpcCaller, operation: RpcOperation) -> None:
        id = caller.request_id if operation.once else ""
        if not id:
            data, is_final = await self._carry_out(caller, operation)
            if is_final or self._serving():
                await self._respond(caller.message, data)
            return
        digest = hashlib.sha256(f"{caller.operation}\n".encode() + caller.message.data).digest()
        known = self._answers.get(caller.identity, id)
        if known is not None and known.digest != digest:
            reused = errors.Conflict(f"the request id {id!r} was used for another request")
            self._refuse_now(caller.message, reused)
            return
        if known is None:
            known = self._answers.expect(caller.identity, id, digest)
            try:
                data, is_final = await self._carry_out(caller, operation)
            except BaseException:
                self._answers.drop(caller.identity, id)
                known.data.cancel()
                raise
            if not is_final and not self._serving():  # another server will execute it when it is repeated
                self._answers.drop(caller.identity, id)
                known.data.cancel()
                return
            self._answers.keep(caller.identity, id, data, remember=is_final)
        with contextlib.suppress(asyncio.CancelledError):  # of the first request, not of this task
            data = await asyncio.shield(known.data)
            await self._respond(caller.message, data)

    # Carrying out.

    async def _carry_out(self, caller: requests.RpcCaller, operation: RpcOperation) -> tuple[bytes, bool]:
        """The reply, and whether a repetition gets the same: not if nothing was done because the service
        was unavailable.  The audit record is stored when this returns."""
        call, arguments = RpcCall(caller), {}
        if operation.is_audited:
            call.details |= origin.details(caller.message)
        failure: errors.MusterError | None = None
        answer = b""
        try:
            async with self._gate:
                request = operation.parse(caller.message.data)
                arguments = fields_of(request) if operation.decode is None else {}
                await self._authorize(call, operation, arguments)
                # below the span of the caller: the message's trace is that of this task
                with spans.span(
                    f"{self._part} {operation.name}", spans.SpanKind.SERVER, identity=caller.identity
                ):
                    call.trace = trace.current.get()
                    answer = self._codec.result(await self._run(operation, call, request))
        except errors.MusterError as error:
            failure = error
            if isinstance(error, errors.InvalidInput):
                self.charge(caller.identity, admission_.MALFORMED)
        except asyncio.CancelledError:
            call.outcome = messages.DecisionOutcome.IN_DOUBT
            self._record_later(call, operation, arguments, "the service stopped during the operation")
            raise
        except Exception as error:  # noqa: BLE001  (a bug of the service must not leave the caller waiting)
            events.error("operation-failed", operation=caller.operation, by=caller.identity, error=error)
            failure = errors.InvariantViolation(
                f"{caller.operation} failed with an internal error ({type(error).__name__}); "
                "the log of the service has the details"
            )
        if (task := asyncio.current_task()) is not None:
            self._finishing.add(task)
        self._count(failure.code if failure else "done")
        if failure is not None:
            call.outcome = messages.DecisionOutcome.of(failure)
            call.details["error"] = failure.message
        if operation.is_audited and call.audited:
            await self._record(call, operation, arguments)
        if failure is None:
            return answer, True
        not_done = (
            isinstance(failure, errors.Unavailable) and call.outcome is not messages.DecisionOutcome.IN_DOUBT
        )
        return self._codec.error(failure), not not_done

    async def _run(self, operation: RpcOperation, call: RpcCall, request: Any) -> Any:
        if operation.timeout_s is None:
            return await operation.run(call, request)
        limit = asyncio.timeout(operation.timeout_s)
        try:
            async with limit:
                return await operation.run(call, request)
        except TimeoutError:
            if not limit.expired():  # the handler's own
                raise
            raise errors.TimedOut(f"{operation.name} was not done in {operation.timeout_s:g} s") from None

    async def _respond(self, message: api.Message, data: bytes) -> None:
        with contextlib.suppress(errors.Unavailable):
            try:
                await message.respond(data)
            except errors.LimitExceeded:
                self.outcomes["oversize"] += 1
                too_large = errors.LimitExceeded(
                    f"the result is {len(data)} bytes, which is more than a message holds",
                    hint="request it in pages, with a limit, or with a narrower selection",
                )
                await message.respond(self._codec.error(too_large))

    # The audit.

    def _record_later(
        self, call: RpcCall, operation: RpcOperation, arguments: Mapping[str, Any], why: str
    ) -> None:
        if operation.is_audited:
            call.details["error"] = why
            task = self._supervisor.spawn("record", self._record(call, operation, arguments))
            self._records.add(task)
            task.add_done_callback(self._records.discard)

    async def _record(self, call: RpcCall, operation: RpcOperation, arguments: Mapping[str, Any]) -> None:
        target = call.target
        if target is None:
            target = (operation.target or target_of)(arguments)
        trace.current.set(call.trace)  # of this task, which ends with the request
        await self._audit.record(
            operation.what or operation.name.rpartition(".")[2],
            target,
            call.why or f"requested by {call.actor}",
            who=call.identity,
            on_behalf_of=call.on_behalf_of,
            outcome=call.outcome,
            **call.details,
        )


async def metered(identity: str, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run what ``begin`` returns in the slices of the identity, and charge the milliseconds of each step."""
    return await _steps(begin(), identity, admission_.of_loop(asyncio.get_running_loop()))


@types.coroutine
def _steps(
    work: Coroutine[Any, Any, T], identity: str, admission: admission_.LoopAdmission
) -> Generator[Any, Any, T]:
    error: BaseException | None = None
    slices, loop = admission.slices, asyncio.get_running_loop()
    while True:
        try:
            while error is None and not slices.is_left(identity):
                yield  # until the next turn
        except BaseException as thrown:  # noqa: BLE001  (it is thrown into the work)
            error = thrown
        started_s = slices.start()
        try:
            waits_for = work.send(None) if error is None else work.throw(error)
        except StopIteration as end:
            return cast("T", end.value)
        finally:
            admission.charge(identity, slices.stop(identity, started_s), loop.time())
        try:
            error = None
            yield waits_for
        except BaseException as thrown:  # noqa: BLE001  (it is thrown into the work)
            error = thrown


def _patterns(operations: Mapping[str, RpcOperation]) -> list[tuple[str, RpcOperation | None]]:
    """The subscriptions below the sender: one for each kind, and one for each name with wildcards."""
    patterns: dict[str, RpcOperation | None] = {}
    for name, operation in operations.items():
        kind, dot, _ = name.partition(".")
        if "*" in name or not dot:
            patterns[name] = operation
        else:
            patterns[f"{kind}.*"] = None
    return list(patterns.items())


_NAMES = ("names", "name", "target", "agent", "id", "key", "where")


def target_of(arguments: Mapping[str, Any]) -> str:
    """The target of an operation, if its arguments name it."""
    for name in _NAMES:
        value = arguments.get(name)
        if value:
            return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return "-"


def page(
    rows: Sequence[Any],
    key: Callable[[Any], str],
    after: str = "",
    limit: int = PAGE_ROWS,
    *,
    rows_max: int | None = None,
) -> dict[str, Any]:
    """Some of ``rows``, which are in the order of their ``key``: those after ``after``, as many as fit.

    ``next`` is the ``after`` of the next page, None at the end: see `client.pages`.  ``rows_max`` replaces
    `PAGE_ROWS`, where rows are small and each page costs much.
    """
    limit = min(limit, PAGE_ROWS) if rows_max is None else rows_max
    start = bisect.bisect_right(rows, after, key=key) if after else 0
    end, size = start, 0
    for row in rows[start : start + max(1, limit)]:
        size += len(msgspec.json.encode(row))
        if end > start and size > PAGE_BYTES:
            break
        end += 1
    return {"items": list(rows[start:end]), "next": key(rows[end - 1]) if end < len(rows) else None}
