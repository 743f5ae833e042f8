"""What a component receives when it starts: all it may use of its domain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from muster.app import home
from muster.app.supervisor import fork_server
from muster.bus import api
from muster.core.settings import domain
from muster.core.telemetry import log, metrics
from muster.supervision import tasks
from muster.trust import keyring
from muster.trust.permissions import roles


class ComponentConnector(Protocol):
    """Connects to the domain's bus; credentials are issued to an identity that has none."""

    async def __call__(self, identity: str, role: roles.Role) -> api.Bus: ...


@dataclass(frozen=True, slots=True)
class ComponentContext:
    settings: domain.BaseSettings
    folder: home.DomainFolder
    trust: keyring.Keyring
    bus: api.Bus  # the domain's own connection
    connect: ComponentConnector  # for a component with its own identity
    metrics: metrics.Metrics
    log: log.EventLog
    fork_server: fork_server.ForkServer
    tasks: tasks.TaskSupervisor  # ended with the component; a fatal failure is the failure of the component
    servers: Callable[[], tuple[str, ...]] = tuple  # the current addresses of the domain's brokers
    watch_folder: Callable[[str, Path, int], None] = lambda *_: None  # (name, folder, limit in bytes)
    storage_problem: Callable[[], str] = str  # why nothing can be stored at present; empty if it can
