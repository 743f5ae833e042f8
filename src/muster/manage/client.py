"""What others call: users, web, wsman, cli, simulate.

    fleet = client.Client(bus)
    await fleet.apply(open("fleet.yaml").read())
    await fleet.wait("web-1", "up")

The operations on one resource are `describe` (its whole representation; `observe` has its adapter look
first), `create`, `put`, `delete`, `rename`, `enumerate` (page by page), `subscribe` and `execute`.  Each has
the registry see to it, so that what should be and what is do not part; errors are those of `core.errors`.

A door that acts for people it has authenticated itself names them: ``Client(bus, on_behalf_of="alice")``
stands in the audit so.  Who may do what goes by the door's own identity.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from muster.bus import api
from muster.bus.rpc import client, error_replies
from muster.core import errors, messages, subjects
from muster.core.settings import loader
from muster.manage import manifest, protocol
from muster.manage import secrets as manage_secrets
from muster.manage.adapters import plugins
from muster.predicates.backends import python
from muster.predicates.syntax import parser
from muster.trust import sealed_box

TIMEOUT_S = 30.0
READ_TRY_S = 2.0
EXEC_TRY_S = 3.0  # the same id is carried out once: what a broker lost on its way is asked again
LOOK_S = 2.0  # a state may have been missed: look again
NAMES_MAX = 500  # in one question: answers must fit into a message
EXEC_FEWER = (20, 1)  # asked for together again, where results are long

_STATE = protocol.STATES.removesuffix("*")

Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ResourcePage:
    """Some of a list; the rest is behind ``next``, None at the end."""

    items: list[Row]
    next: str | None


class ManageClient:
    def __init__(self, bus: api.Bus, *, timeout_s: float = TIMEOUT_S, on_behalf_of: str = "") -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._on_behalf_of = on_behalf_of
        self.dropped = 0  # changes and events that came faster than a subscriber took them

    # Manifests

    async def apply(
        self,
        text: str,
        *,
        wait_s: float | None = None,
        progress: Callable[[str, float], None] = lambda name, part: None,
    ) -> dict[str, Any]:
        """The text of a manifest; `manifest.Fault` has line and field.

        Returns ``counts`` of what was to be done, ``changed_count``, and the first of the names: ``changed``,
        ``deleting``.  With ``wait_s``, waits until all of it is in its desired state.
        """
        entries = _entries(text)
        found: dict[str, Any] = await self._ask("apply", entries=entries)
        if wait_s is not None:
            deadline = time.monotonic() + wait_s
            await self._wait_all([entry["name"] for entry in entries], wait_s, progress)
            left_s = max(0.1, deadline - time.monotonic())
            await self.wait_gone(*found["deleting"], timeout_s=left_s)
        return found

    async def plan(self, text: str) -> list[Row]:
        return [line async for line in self._pages("plan", entries=_entries(text))]

    async def delete_manifest(self, text: str, *, force: bool = False) -> dict[str, Any]:
        return await self.delete(*(entry["name"] for entry in _entries(text)), force=force)

    # One resource

    async def create(self, entry: Mapping[str, Any]) -> Row:
        """``entry`` as in a manifest: name, type, agent or where, config, … `errors.AlreadyExists`.

        Returns its description at once; `wait` waits until it is up.
        """
        _check(entry)
        found: Row = await self._ask("create", entry=dict(entry))
        return found

    async def put(self, name: str, *, generation: int | None = None, **changes: Any) -> Row:
        """Change fields of its entry: ``put("web-1", config={…}, wanted="down")``.

        ``generation``, where given, is the one that was read: `errors.Conflict` if it is another by now.
        """
        if "config" in changes:
            known = await self.describe(name)
            _check({"name": name, "type": known["type"], "agent": "any", "config": changes["config"]})
        found: Row = await self._ask("put", name=name, changes=changes, generation=generation)
        return found

    async def rename(self, name: str, to: str) -> Row:
        """The same resource, undisturbed, under another name; those who depend on it follow."""
        found: Row = await self._ask("rename", name=name, to=to)
        return found

    async def delete(self, *names: str, generation: int | None = None, force: bool = False) -> dict[str, Any]:
        """Returns when it is recorded; `wait_gone` waits for it. ``generation``: as in `put`.

        ``force`` removes them from the registry at once, without their agents: for machines that are lost.
        What still runs there goes on, unmanaged.
        """
        found: dict[str, Any] = await self._ask(
            "delete", names=list(names), generation=generation, force=force
        )
        return found

    async def describe(self, name: str) -> Row:
        """All there is to tell of one: its row, ``spec``, ``status``, who applied it, what it waits for."""
        found: Row = await self._read("describe", name=name)
        return found

    async def observe(self, name: str) -> Row:
        """How its adapter sees it now, having just looked."""
        found: Row = await self.execute(name, protocol.Verb.GET.value)
        return found

    async def operations(self, name: str) -> list[str]:
        """What `execute` can be asked of it."""
        found: list[str] = (await self.execute(name, protocol.Verb.ENUMERATE.value))["operations"]
        return found

    async def execute(
        self,
        name: str,
        operation: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = protocol.OPERATION_TIMEOUT_S,
        id: str | None = None,
    ) -> Any:
        """The operation's result; raises where it was refused, failed, or is in doubt (`errors.TimedOut`)."""
        (answer,) = await self.exec(operation, name, arguments=arguments, timeout_s=timeout_s, id=id)
        match messages.DecisionOutcome(answer["outcome"]):
            case messages.DecisionOutcome.DONE:
                return answer["result"]
            case messages.DecisionOutcome.IN_DOUBT:
                raise errors.TimedOut(f"{name}: {operation} is in doubt: {answer['reason']}")
        fault = error_replies.ErrorReply(
            code=answer["code"] or errors.Refused.code,
            kind=errors.Refused.code,
            message=f"{name}: {answer['reason']}",
            exit_code=errors.Refused.exit_code,
        )
        raise error_replies.from_error_reply(fault)

    async def logs(self, name: str) -> str:
        return str(await self.execute(name, "logs"))

    # Many

    async def get(self, *names: str, where: str = "") -> list[Row]:
        """Rows of those named, or of those of which ``where`` is true, or of all."""
        if not names:
            return [row async for row in self._rows(where)]
        found = await asyncio.gather(*map(self._get, _parts(names, NAMES_MAX)))
        return [row for page in found for row in page]

    async def _get(self, names: Sequence[str]) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < len(names):
            rows += await self._read("get", names=list(names[len(rows) :]))
        return rows

    async def enumerate(self, *, where: str = "", after: str = "", limit: int = 100) -> ResourcePage:
        """Rows in the order of their names, those behind ``after``; at most ``limit``, and as many as fit."""
        found = await self._read("enumerate", where=where, after=after, limit=limit)
        return ResourcePage(found["items"], found["next"])

    async def _rows(self, where: str) -> AsyncIterator[Row]:
        async for row in self._pages("enumerate", where=where):
            yield row

    async def names(self, *, where: str = "") -> list[str]:
        pages = self._pages("enumerate", where=where, limit=5_000, names_only=True)
        return [name async for name in pages]

    async def exec(
        self,
        operation: str,
        *names: str,
        where: str = "",
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float = protocol.OPERATION_TIMEOUT_S,
        id: str | None = None,
    ) -> list[Row]:
        """On all of them at once: what became of each. The same ``id`` again does nothing again.

        Rows of which ``truncated`` is true have the part of a result that an agent sends.
        """
        if not names and not where:
            raise errors.InvalidInput("say which resources: names, or an expression")
        chosen = list(names) or await self.names(where=where)
        id = id or secrets.token_hex(8)

        async def ask(some: list[str]) -> list[Row]:
            found: list[Row] = await self._ask(
                "exec",
                extra_s=timeout_s,
                try_s=EXEC_TRY_S,
                operation=operation,
                names=some,
                arguments=dict(arguments or {}),
                timeout_s=timeout_s,
                id=id,
            )
            return found

        found = await asyncio.gather(*map(ask, _parts(chosen, NAMES_MAX)))
        rows = [row for page in found for row in page]
        # Results that had no room beside the others: for fewer at a time there is more.
        for many in EXEC_FEWER:
            cut = [number for number, row in enumerate(rows) if row["truncated"]]
            for some in _parts(cut, many) if len(rows) > many else ():
                again = await ask([rows[number]["resource"] for number in some])
                for number, row in zip(some, again, strict=True):
                    if row["result"] is not None:  # its agent may have forgotten it meanwhile
                        rows[number] = row
        return rows

    async def drain(self, name: str) -> dict[str, Any]:
        """A resource, or all of an agent's, which then takes no more."""
        found: dict[str, Any] = await self._ask("drain", name=name)
        return found

    async def undrain(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("undrain", name=name)
        return found

    async def forget(self, agent: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("forget", agent=agent)
        return found

    async def summary(self) -> dict[str, Any]:
        """How many resources there are in each state, and of each group, type and manager."""
        found: dict[str, Any] = await self._read("summary")
        return found

    async def agents(self) -> list[Row]:
        return [row async for row in self._pages("agents")]

    async def managers(self) -> list[Row]:
        return [row async for row in self._pages("managers")]

    # What happens

    async def subscribe(
        self, *names: str, where: str = ""
    ) -> AsyncIterator[protocol.ResourceStateChange | protocol.ResourceEvent]:
        """Changes of health as managers say them, and events of the resources' own, as they come.

        Of those named, or all; and of these, those of which ``where`` is true: a predicate on the fields
        ``resource``, ``state``, ``was``, ``reason``, ``manager`` of a change, and ``resource``, ``what`` and
        the details of an event.
        """
        async with self.listening(*names, where=where) as heard:
            async for one in heard:
                yield one

    @contextlib.asynccontextmanager
    async def listening(
        self, *names: str, where: str = ""
    ) -> AsyncIterator[AsyncIterator[protocol.ResourceStateChange | protocol.ResourceEvent]]:
        """As `subscribe`; nothing is missed that happens once it is entered."""
        matches = python.compile(parser.parse(where)) if where else None
        wanted = set(names)
        queue: asyncio.Queue[api.Message] = asyncio.Queue(maxsize=65_536)

        def heard(message: api.Message) -> None:
            if not wanted or message.subject.rpartition(".")[2] in wanted:
                if queue.full():
                    self.dropped += 1
                    queue.get_nowait()  # the newest matter most
                queue.put_nowait(message)

        async def told() -> AsyncIterator[protocol.ResourceStateChange | protocol.ResourceEvent]:
            while True:
                message = await queue.get()
                try:
                    one: protocol.ResourceStateChange | protocol.ResourceEvent = (
                        messages.decode(message.data, protocol.ResourceStateChange)
                        if message.subject.startswith(_STATE)
                        else messages.decode(message.data, protocol.ResourceEvent)
                    )
                except errors.InvalidInput:
                    continue  # of a version that this does not know
                if matches is None or matches(_fields(one).get):
                    yield one

        async with (
            await self._bus.subscribe(protocol.STATES, handler=heard),
            await self._bus.subscribe(protocol.EVENTS, handler=heard),
        ):
            await self._bus.flush()
            yield told()

    async def watch(self) -> AsyncIterator[protocol.ResourceStateChange]:
        """Changes of health alone."""
        async for one in self.subscribe():
            if isinstance(one, protocol.ResourceStateChange):
                yield one

    async def wait(self, name: str, state: str | None = None, *, timeout_s: float = 30.0) -> Row:
        """Until the registry reports it in this state, or, without one, in its desired state."""
        row: Row = {}

        async def look() -> bool:
            nonlocal row
            row = (await self.get(name))[0]
            return _is_in(row, state)

        await self._until(look, timeout_s, lambda: f"{name} is {row.get('state')}: {row.get('reason')}")
        return row

    async def _wait_all(
        self, names: list[str], timeout_s: float, progress: Callable[[str, float], None]
    ) -> None:
        """Until each has been in its desired state, some of them at a time."""
        left, row = names, Row()

        async def look() -> bool:
            nonlocal left, row
            while left:
                rows = await self.get(*left[:NAMES_MAX])
                waiting = [one for one in rows if not _is_in(one, None)]
                left = [one["name"] for one in waiting] + left[NAMES_MAX:]
                if waiting:
                    row = waiting[0]
                    progress(row["name"], 1 - len(left) / len(names))
                    return False
            return True

        await self._until(look, timeout_s, lambda: f"{row.get('name')} is {row['state']}: {row['reason']}")

    async def wait_gone(self, *names: str, timeout_s: float = 30.0) -> None:
        left: list[str] = []
        row: Row = {}

        async def look() -> bool:
            nonlocal left, row
            left = sorted(set(names) & set(await self.names()))
            if left:
                with contextlib.suppress(errors.NotFound):
                    row = (await self.get(left[0]))[0]
            return not left

        def problem() -> str:
            return (
                f"{len(left)} not gone yet: {', '.join(left[:5])}; {row.get('name')} on {row.get('agent')} "
                f"is {row.get('state')} ({row.get('reason')}). Where a machine is lost, delete with force"
            )

        await self._until(look, timeout_s, problem)

    async def _until(self, look: Any, timeout_s: float, problem: Any) -> None:
        """Look, and again at each change of any state."""
        try:
            async with asyncio.timeout(timeout_s), await self._bus.subscribe(protocol.STATES) as changes:
                wait_s = 0.05
                while not await look():
                    try:
                        await changes.next(timeout_s=wait_s)
                    except errors.TimedOut:
                        wait_s = min(LOOK_S, wait_s * 1.5)
        except TimeoutError:
            raise errors.TimedOut(f"after {timeout_s:g} s {problem()}") from None

    # Rollouts

    async def rollout(self, plan: dict[str, Any], *names: str, where: str = "") -> Row:
        """Begin one: ``plan`` has operation, arguments, batch, pause_s, errors_max, timeout_s."""
        found: Row = await self._ask("rollout", plan=plan, names=list(names), where=where)
        return found

    async def rollouts(self, id: str | None = None) -> list[Row]:
        """The oldest first; or only the one with this id."""
        return [row async for row in self._pages("rollouts", id=id)]

    async def rollout_steps(self, id: str) -> list[Row]:
        """Of each of its resources: state, reason and result."""
        return [row async for row in self._pages("rollout-steps", id=id)]

    async def pause(self, id: str) -> Row:
        found: Row = await self._ask("pause", id=id)
        return found

    async def resume(self, id: str) -> Row:
        found: Row = await self._ask("resume", id=id)
        return found

    # Secrets

    async def set_secret(self, name: str, value: str) -> Row:
        """Keep it in the domain's store; it leaves this process sealed. Tells which resources use it."""
        if not value or len(value.encode()) > loader.MAX_SECRET_BYTES:
            raise errors.InvalidInput(f"a secret has 1 to {loader.MAX_SECRET_BYTES} bytes")
        public: str = await self._read("secret-key")
        box = sealed_box.seal(public, value.encode(), manage_secrets.storage_context(subjects.token(name)))
        found: Row = await self._ask("secret-set", name=name, box=box)
        return found

    async def secrets(self) -> list[Row]:
        """Names, who set them and when, and what uses them; values are told to nobody."""
        return [row async for row in self._pages("secrets")]

    async def delete_secret(self, name: str) -> Row:
        found: Row = await self._ask("secret-delete", name=name)
        return found

    # The audit

    async def decisions(self, *, last: int = 100) -> list[messages.Decision]:
        """The audit's end; for operators, who may read streams."""
        stream = await self._bus.open_stream(messages.DECISIONS_STREAM)
        state = await stream.state()
        first = max(state.first_sequence, state.last_sequence - last + 1)
        if not state.messages:
            return []
        return [
            messages.decode(one.data, messages.Decision)
            async for one in stream.read(first, state.last_sequence, gaps=True)
        ]

    async def _ask(
        self, verb: str, *, extra_s: float = 0.0, try_s: float | None = None, **arguments: Any
    ) -> Any:
        subject = protocol.request(self._bus.identity, verb)
        try:
            return await call(
                self._bus,
                subject,
                arguments,
                timeout_s=self._timeout_s + extra_s,
                try_s=try_s,
                on_behalf_of=self._on_behalf_of,
            )
        except errors.LimitExceeded as error:
            error.hint = error.hint or "ask for fewer resources at a time; each request is stored whole"
            raise

    async def _read(self, verb: str, **arguments: Any) -> Any:
        subject = protocol.read(self._bus.identity, verb)
        return await call(self._bus, subject, arguments, timeout_s=self._timeout_s, try_s=READ_TRY_S)

    def _pages(self, verb: str, **arguments: Any) -> AsyncIterator[Any]:
        subject = protocol.read(self._bus.identity, verb)
        return client.pages(
            self._bus, subject, arguments, timeout_s=self._timeout_s, try_s=READ_TRY_S, absent=_absent()
        )


async def call(bus: api.Bus, subject: str, arguments: Mapping[str, Any], **options: Any) -> Any:
    """A request to the acting registry; while none acts (a take-over) it waits. See `rpc.client.call`."""
    return await client.call(bus, subject, arguments, absent=_absent(), **options)


def _absent() -> errors.Unavailable:
    return errors.Unavailable(
        "no registry acts on this bus", hint="is management enabled in the domain's settings?"
    )


def _parts(items: Sequence[T], many: int) -> list[list[T]]:
    return [list(items[first : first + many]) for first in range(0, len(items), many)]


def _is_in(row: Row, state: str | None) -> bool:
    """Whether it is in this state, or, without one, in its desired state."""
    return bool(row["state"] == (state or row["wanted"]) and row["applied"])


def _entries(text: str) -> list[Any]:
    found: list[Any] = msgspec.to_builtins(manifest.read(text, plugins.config_validators()))
    return found


def _check(entry: Mapping[str, Any]) -> None:
    """As a manifest's entries are: fields, type, configuration, open secrets."""
    manifest.read(msgspec.json.encode({"resources": [entry]}).decode(), plugins.config_validators())


def _fields(one: protocol.ResourceStateChange | protocol.ResourceEvent) -> dict[str, Any]:
    if isinstance(one, protocol.ResourceEvent):
        return {**one.details, "resource": one.resource, "what": one.what}
    return {
        "resource": one.resource,
        "state": one.state.value,
        "was": one.was.value if one.was else None,
        "reason": one.reason,
        "manager": one.manager,
    }
