"""`m.notify`: events to receivers that are selected by their state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Self

from muster.bus import api
from muster.client import rows
from muster.core import errors
from muster.notify import client, queries
from muster.notify import models as notify_models
from muster.notify import rows as notify_rows
from muster.predicates import types

PARTICIPANT = "cli"  # the default name of a sender, as on the command line
LIMIT = 1_000
TIMEOUT_S = 10.0
LEAVE_S = 2.0
#: Types of attributes: a Python type, a set of words, or the notation of models, as "set{docs, cgi}".
Attributes = Mapping[str, type | str | set[str]]
_TYPES = {str: types.STRING, int: types.INT, float: types.FLOAT, bool: types.BOOL}


class AsyncNotify:
    """Selective notification; as `muster notify`.

    >>> await m.notify.define("WebServer", application=str, load=float)
    >>> await m.notify.define_event("alert", level=int)
    >>> async with await m.notify.join("web-1", "WebServer", {"load": 0.9}, policy="level > 2") as web:
    ...     sent = await m.notify.send("alert", {"level": 4}, to="load > 0.8")
    ...     event = await web.next(timeout_s=10)
    >>> event["level"]
    4
    """

    def __init__(self, bus: api.Bus, stack: contextlib.AsyncExitStack) -> None:
        self._bus = bus
        self._stack = stack
        self._opening = asyncio.Lock()
        self._receivers: client.NotifyClient | None = None

    def __repr__(self) -> str:
        return "<the receivers and events of the domain>"

    async def send(
        self,
        event: str,
        content: notify_models.State | None = None,
        *,
        to: str = "TRUE",
        durable: bool = False,
        name: str = PARTICIPANT,
        timeout_s: float = TIMEOUT_S,
    ) -> str:
        """Send an event of a defined type to the receivers whose state matches ``to``; returns its id.

        A receiver gets it if its policy accepts the event and its sender, which is called ``name``.
        """
        sender = await self._client()
        return await sender.send(
            name, event, content, to=to, durable=durable, defined=True, timeout_s=timeout_s
        )

    async def define(self, model: str, /, **attributes: type | str | set[str]) -> None:
        """Define a model of receivers: the names and types of the values in their state."""
        await self._define(model, attributes, notify_models.ModelKind.RECEIVER)

    async def define_event(self, event: str, /, **attributes: type | str | set[str]) -> None:
        """Define a type of events: the names and types of the values in their content."""
        await self._define(event, attributes, notify_models.ModelKind.EVENT)

    async def models(self) -> rows.Rows[notify_rows.ModelRow]:
        """The models of receivers and of events."""
        return rows.Rows(await queries.list_models(self._bus))

    async def receivers(self, where: str = "", *, limit: int = LIMIT) -> rows.Rows[notify_rows.ReceiverRow]:
        """Receivers with their states and policies, sorted by name."""
        listed = await queries.list_receivers(self._bus, where=where, limit=limit)
        return rows.Rows(listed.receivers, complete=listed.next is None)

    async def join(
        self,
        name: str,
        model: str,
        state: notify_models.State | None = None,
        *,
        policy: str,
        durable: bool = False,
    ) -> AsyncReceiver:
        """Register a receiver. ``durable``: durable events are stored while it is disconnected."""
        receivers = await self._client()
        handle = await receivers.advertise(name, model, state, policy=policy, durable=durable)
        return AsyncReceiver(handle, durable)

    async def _define(self, name: str, attributes: Attributes, kind: notify_models.ModelKind) -> None:
        typed = {attribute: _attribute_type(declared) for attribute, declared in attributes.items()}
        await (await self._client()).define(notify_models.Model(name, typed, kind))

    async def _client(self) -> client.NotifyClient:
        async with self._opening:
            if self._receivers is None:  # it stays so if the subscription fails: the next call repeats it
                self._receivers = await self._stack.enter_async_context(client.NotifyClient(self._bus))
            return self._receivers


class AsyncReceiver:
    """A receiver of events: iterate, or read the `next` one.  As a context manager it leaves at the end,
    unless it is durable.
    """

    def __init__(self, handle: client.ReceiverHandle, durable: bool) -> None:
        self._handle = handle
        self._durable = durable

    @property
    def name(self) -> str:
        """Its name, without that of the process."""
        return self._handle.name

    @property
    def id(self) -> str:
        """Its identity and name, as policies and lists show it."""
        return self._handle.id

    async def update(self, /, **values: types.Value) -> None:
        """Change values of its state."""
        await self._handle.update(**values)

    async def policy(self, policy: str) -> None:
        """Replace its policy."""
        await self._handle.policy(policy)

    async def next(self, *, timeout_s: float | None = None) -> client.ReceivedEvent:
        """The next event; acknowledges the previous one. `errors.TimedOut` if there is none."""
        return await self._handle.next(timeout_s=timeout_s)

    async def leave(self) -> None:
        """Remove the receiver; its stored events are discarded."""
        await self._handle.leave()

    async def __aiter__(self) -> AsyncIterator[client.ReceivedEvent]:
        async for event in self._handle:
            yield event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._handle.acknowledge()
        if not self._durable:
            with contextlib.suppress(TimeoutError, errors.Unavailable):  # the domain may be unavailable
                async with asyncio.timeout(LEAVE_S):
                    await self._handle.leave()

    def __repr__(self) -> str:
        return f"<receiver {self.id}>"


def _attribute_type(declared: type | str | set[str]) -> types.AttributeType:
    if isinstance(declared, str):
        return types.parse_type(declared)
    if isinstance(declared, set | frozenset):
        return types.set_of(*sorted(declared))
    if declared not in _TYPES:
        raise errors.InvalidInput(
            f"an attribute cannot have the type {declared!r}",
            hint="use str, int, float, bool or a set of words",
        )
    return _TYPES[declared]
