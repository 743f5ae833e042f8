"""What an adapter is: the service adapter that stands next to one resource.

Write one as a class with a ``type_name``, a ``config_type`` (a msgspec struct: manifests are checked against
it), and the coroutines below; name it in the entry points ``muster.adapters`` of its distribution.  What it
may rely on:

- calls come one at a time, from one event loop, each with a deadline (cancellation means: time is up);
- each must be idempotent: after a crash, the same call may come again;
- `Place.runtime` is stored when a call returns, and handed back in `resume` after the agent was restarted;
  `Place.save` stores it at once, for what must be on disk before the adapter goes on;
- whatever happens to the resource between calls is told with `Place.changed`, as soon as it is known.

``do_NAME`` coroutines are operations that `muster exec RESOURCE NAME` calls; ``start``, ``stop`` and
``drain`` are called by managers too.
"""

from __future__ import annotations

import abc
import asyncio
import os
import pathlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from muster.bus.brokers import config
from muster.core import errors
from muster.core.settings import loader
from muster.manage import protocol

OPERATION_PREFIX = "do_"


async def _nothing_to_save() -> None: ...


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """What a broker needs to admit the domain's identities and no others, and to join other brokers."""

    trust: config.OperatorTrust
    account: str  # the public key of the domain's
    link_credentials: pathlib.Path


@dataclass(slots=True)
class AdapterContext:
    """Where an adapter stands: what its agent gives it."""

    name: str
    folder: pathlib.Path | None  # its own, for files; None where nothing is kept
    changed: Callable[[protocol.ObservedState], None]
    runtime: dict[str, Any] = field(default_factory=dict)
    happened: Callable[..., None] = lambda *_, **__: None  # (what, **details): an event, for who subscribes
    neighbour: Callable[[str], Adapter | None] = lambda _: None  # another resource of the same agent
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    stored: Callable[[str], Awaitable[str]] | None = None  # the secret of this name in the domain's store
    save: Callable[[], Awaitable[None]] = _nothing_to_save
    broker_access: Callable[[], Awaitable[BrokerAccess]] | None = None  # None: no brokers are made here
    generation: int = 0  # of the wish that the call under way, or the last one, is to bring about

    async def secret(self, reference: Mapping[str, str]) -> str:
        """The value behind ``{"secret": "file:…"}`` (or env, or store): to be used, and not to be kept."""
        kind, _, name = reference.get("secret", "").partition(":")
        if kind != "store":
            return await asyncio.to_thread(
                loader.read_secret, reference.get("secret", ""), self.environment, folder=self.folder
            )
        if self.stored is None:
            raise errors.Unavailable("there is no domain here whose store could have it")
        return await self.stored(name)


class Adapter(abc.ABC):
    type_name: ClassVar[str]
    config_type: ClassVar[type[msgspec.Struct]]
    can_be_renamed: ClassVar[bool] = True  # whether its resource minds that its folder moves

    def __init__(self, place: AdapterContext) -> None:
        self.place = place

    @abc.abstractmethod
    async def create(self, config: Any, *, start: bool) -> None:
        """Make the resource, and start it if ``start``. What is there already is brought to ``config``."""

    @abc.abstractmethod
    async def put(self, config: Any) -> None:
        """Bring the resource to ``config``, with as little disturbance as possible."""

    @abc.abstractmethod
    async def delete(self) -> None:
        """Stop it and remove it. When this returns, it is gone."""

    @abc.abstractmethod
    async def observe(self) -> protocol.ObservedState:
        """How it is now. ``digest`` may be left empty: the agent fills in that of the last configuration."""

    @abc.abstractmethod
    async def resume(self, config: Any) -> None:
        """The agent was restarted: find the resource again by `Place.runtime`, and start nothing."""

    async def close(self) -> None:  # noqa: B027  (many have nothing to let go of)
        """The agent stops. The resource goes on."""

    async def execute(self, operation: str, arguments: dict[str, Any]) -> Any:
        function = getattr(self, OPERATION_PREFIX + operation.replace("-", "_"), None)
        if function is None:
            raise errors.NotFound(
                f"a {self.type_name} has no operation {operation!r}",
                hint=f"it has: {', '.join(self.operations())}",
            )
        try:
            return await function(**arguments)
        except TypeError as error:
            raise errors.InvalidInput(f"{operation}: {error}") from error

    def operations(self) -> list[str]:
        prefix = OPERATION_PREFIX
        return sorted(
            name.removeprefix(prefix).replace("_", "-") for name in dir(self) if name.startswith(prefix)
        )


def convert(kind: type[Adapter], config: Mapping[str, Any]) -> Any:
    """The configuration as its adapter's own type; `errors.InvalidInput` names the path at fault."""
    try:
        return msgspec.convert(dict(config), kind.config_type)
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(str(error)) from error
