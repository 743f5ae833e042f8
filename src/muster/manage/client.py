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
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from muster.bus import api
from muster.bus.rpc import client, faults
from muster.core import errors, messages, settings, subjects
from muster.manage import manifest, protocol, secrecy
from muster.manage.adapters import catalogue
from muster.predicates import closure, parser
from muster.trust import sealing

TIMEOUT_S = 30.0
READ_TRY_S = 2.0
EXEC_TRY_S = 3.0  # the same id is carried out once: what a broker lost on its way is asked again
LOOK_S = 2.0  # a state may have been missed: look again
NAMES_MAX = 500  # in one question: answers must fit into a message

_STATE = protocol.STATES.removesuffix("*")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """Some of a list; the rest is behind ``next``, None at the end."""

    items: list[Row]
    next: str | None


class Client:
    def __init__(self, bus: api.Bus, *, timeout_s: float = TIMEOUT_S, on_behalf_of: str = "") -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._on_behalf_of = on_behalf_of

    # Manifests

    async def apply(self, text: str) -> dict[str, Any]:
        """The text of a manifest. Returns the plan and what changed; `manifest.Fault` says line and field."""
        found: dict[str, Any] = await self._ask("apply", entries=_entries(text))
        return found

    async def plan(self, text: str) -> list[Row]:
        found: list[Row] = await self._read("plan", entries=_entries(text))
        return found

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
        match messages.Outcome(answer["outcome"]):
            case messages.Outcome.DONE:
                return answer["result"]
            case messages.Outcome.IN_DOUBT:
                raise errors.TimedOut(f"{name}: {operation} is in doubt: {answer['reason']}")
        fault = faults.Fault(
            code=answer["code"] or errors.Refused.code,
            kind=errors.Refused.code,
            message=f"{name}: {answer['reason']}",
            exit_code=errors.Refused.exit_code,
        )
        raise faults.error_of(fault)

    async def logs(self, name: str) -> str:
        return str(await self.execute(name, "logs"))

    # Many

    async def get(self, *names: str, where: str = "") -> list[Row]:
        """Rows of those named, or of those of which ``where`` is true, or of all."""
        if not names:
            return [row async for row in self._rows(where)]
        pages = [names[first : first + NAMES_MAX] for first in range(0, len(names), NAMES_MAX)]
        found = await asyncio.gather(*(self._read("get", names=list(page)) for page in pages))
        return [row for page in found for row in page]

    async def enumerate(self, *, where: str = "", after: str = "", limit: int = 100) -> Page:
        """Rows in the order of their names, those behind ``after``; at most ``limit`` (and 200)."""
        found = await self._read("enumerate", where=where, after=after, limit=limit)
        return Page(found["items"], found["next"])

    async def _rows(self, where: str) -> AsyncIterator[Row]:
        after: str | None = ""
        while after is not None:
            page = await self.enumerate(where=where, after=after, limit=200)
            for row in page.items:
                yield row
            after = page.next

    async def names(self, *, where: str = "") -> list[str]:
        found: list[str] = []
        after: str | None = ""
        while after is not None:
            page = await self._read("enumerate", where=where, after=after, limit=5_000, names_only=True)
            found += page["items"]
            after = page["next"]
        return found

    async def exec(
        self,
        operation: str,
        *names: str,
        where: str = "",
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float = protocol.OPERATION_TIMEOUT_S,
        id: str | None = None,
    ) -> list[Row]:
        """On all of them at once: what became of each. The same ``id`` again does nothing again."""
        if not names and not where:
            raise errors.InvalidInput("say which resources: names, or an expression")
        chosen = list(names) or await self.names(where=where)
        id = id or secrets.token_hex(8)
        found = await asyncio.gather(
            *(
                self._ask(
                    "exec",
                    extra_s=timeout_s,
                    try_s=EXEC_TRY_S,
                    operation=operation,
                    names=chosen[first : first + NAMES_MAX],
                    arguments=dict(arguments or {}),
                    timeout_s=timeout_s,
                    id=id,
                )
                for first in range(0, len(chosen), NAMES_MAX)
            )
        )
        return [row for page in found for row in page]

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
        found: list[Row] = await self._read("agents")
        return found

    async def managers(self) -> list[Row]:
        found: list[Row] = await self._read("managers")
        return found

    # What happens

    async def subscribe(self, *names: str, where: str = "") -> AsyncIterator[protocol.State | protocol.Event]:
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
    ) -> AsyncIterator[AsyncIterator[protocol.State | protocol.Event]]:
        """As `subscribe`; nothing is missed that happens once it is entered."""
        matches = closure.compile(parser.parse(where)) if where else None
        wanted = set(names)
        queue: asyncio.Queue[api.Message] = asyncio.Queue(maxsize=65_536)

        def heard(message: api.Message) -> None:
            if not wanted or message.subject.rpartition(".")[2] in wanted:
                if queue.full():
                    queue.get_nowait()  # the newest matter most
                queue.put_nowait(message)

        async def told() -> AsyncIterator[protocol.State | protocol.Event]:
            while True:
                message = await queue.get()
                try:
                    one: protocol.State | protocol.Event = (
                        messages.decode(message.data, protocol.State)
                        if message.subject.startswith(_STATE)
                        else messages.decode(message.data, protocol.Event)
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

    async def watch(self) -> AsyncIterator[protocol.State]:
        """Changes of health alone."""
        async for one in self.subscribe():
            if isinstance(one, protocol.State):
                yield one

    async def wait(self, name: str, state: str | None = None, *, timeout_s: float = 30.0) -> Row:
        """Until the registry reports it in this state, or, without one, in its desired state."""
        row: Row = {}

        async def look() -> bool:
            nonlocal row
            row = (await self.get(name))[0]
            return bool(row["state"] == (state or row["wanted"]) and row["applied"])

        await self._until(look, timeout_s, lambda: f"{name} is {row.get('state')}: {row.get('reason')}")
        return row

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
        found: list[Row] = await self._read("rollouts", id=id)
        return found

    async def rollout_steps(self, id: str) -> list[Row]:
        """Of each of its resources: state, reason and result."""
        found: list[Row] = []
        after: str | None = ""
        while after is not None:
            page = await self._read("rollout-steps", id=id, after=after)
            found += page["items"]
            after = page["next"]
        return found

    async def pause(self, id: str) -> Row:
        found: Row = await self._ask("pause", id=id)
        return found

    async def resume(self, id: str) -> Row:
        found: Row = await self._ask("resume", id=id)
        return found

    # Secrets

    async def set_secret(self, name: str, value: str) -> Row:
        """Keep it in the domain's store; it leaves this process sealed. Tells which resources use it."""
        if not value or len(value.encode()) > settings.MAX_SECRET_BYTES:
            raise errors.InvalidInput(f"a secret has 1 to {settings.MAX_SECRET_BYTES} bytes")
        public: str = await self._read("secret-key")
        box = sealing.seal(public, value.encode(), secrecy.kept_about(subjects.token(name)))
        found: Row = await self._ask("secret-set", name=name, box=box)
        return found

    async def secrets(self) -> list[Row]:
        """Names, who set them and when, and what uses them; values are told to nobody."""
        found: list[Row] = await self._read("secrets")
        return found

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
        return await call(
            self._bus,
            subject,
            arguments,
            timeout_s=self._timeout_s + extra_s,
            try_s=try_s,
            on_behalf_of=self._on_behalf_of,
        )

    async def _read(self, verb: str, **arguments: Any) -> Any:
        subject = protocol.read(self._bus.identity, verb)
        return await call(self._bus, subject, arguments, timeout_s=self._timeout_s, try_s=READ_TRY_S)


async def call(bus: api.Bus, subject: str, arguments: Mapping[str, Any], **options: Any) -> Any:
    """A request to the acting registry; while none acts (a take-over) it waits. See `rpc.client.call`."""
    absent = errors.Unavailable(
        "no registry acts on this bus", hint="is management enabled in the domain's settings?"
    )
    return await client.call(bus, subject, arguments, absent=absent, **options)


def _entries(text: str) -> list[Any]:
    found: list[Any] = msgspec.to_builtins(manifest.read(text, catalogue.checks()))
    return found


def _check(entry: Mapping[str, Any]) -> None:
    """As a manifest's entries are: fields, type, configuration, open secrets."""
    manifest.read(msgspec.json.encode({"resources": [entry]}).decode(), catalogue.checks())


def _fields(one: protocol.State | protocol.Event) -> dict[str, Any]:
    if isinstance(one, protocol.Event):
        return {**one.details, "resource": one.resource, "what": one.what}
    return {
        "resource": one.resource,
        "state": one.state.value,
        "was": one.was.value if one.was else None,
        "reason": one.reason,
        "manager": one.manager,
    }
