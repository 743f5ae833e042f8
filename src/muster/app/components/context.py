"""What a part is handed when it starts: all it may know of the domain it runs in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from muster.app import home
from muster.bus import api
from muster.core.settings import domain
from muster.core.telemetry import log, metrics
from muster.store import database
from muster.trust import keyring
from muster.trust.permissions import roles

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class ComponentConnector(Protocol):
    """A connection to this domain's bus; credentials are issued to an identity that has none."""

    async def __call__(self, identity: str, role: roles.Role) -> api.Bus: ...


@dataclass(frozen=True, slots=True)
class ComponentContext:
    settings: domain.BaseSettings
    folder: home.DomainFolder
    trust: keyring.Keyring
    store: database.Store
    bus: api.Bus  # the domain's own connection
    connect: ComponentConnector  # for a part that needs an identity of its own
    metrics: metrics.Metrics
    log: log.EventLog
    spawn: Spawn  # a task that ends with the part, and whose failure is the part's
    servers: Callable[[], tuple[str, ...]] = tuple  # where the domain's brokers are now
    watch_folder: Callable[[str, Path, int], None] = lambda *_: None  # a name, files, and their budget
