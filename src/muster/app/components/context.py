"""What a component receives when it starts: all it may use of its domain.

It is the same in the process of a domain and in a process of its own, but for the domain's own connection and
the fork server, which only the former has.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from muster.app import access, home
from muster.app.machines import membership
from muster.app.supervisor import component_config, endpoints, fork_server
from muster.bus import api
from muster.core import errors
from muster.core.settings import domain
from muster.core.telemetry import log, metrics
from muster.supervision import tasks
from muster.trust import keyring
from muster.trust.permissions import roles


class ComponentConnector(Protocol):
    """Connects to the domain's bus; credentials are issued to an identity that has none."""

    async def __call__(self, identity: str, role: roles.Role) -> api.Bus: ...


class InDomain(Protocol):
    """What only the process of the domain has."""

    @property
    def bus(self) -> api.Bus:
        """The domain's own connection."""
        ...

    @property
    def fork_server(self) -> fork_server.ForkServer: ...
    @property
    def report(self) -> membership.MachineReport: ...


@dataclass(frozen=True, slots=True)
class ComponentContext:
    settings: domain.BaseSettings
    folder: home.DomainFolder
    access: access.DomainAccess
    metrics: metrics.Metrics
    log: log.EventLog
    tasks: tasks.TaskSupervisor  # ended with the component; a fatal failure is the failure of the component
    template: Callable[[], component_config.ComponentConfig]  # for the processes that the component starts
    in_domain: InDomain | None = None
    listener: int | None = None  # an open socket, in place of the host and port of the settings
    watch_folder: Callable[[str, Path, int], None] = lambda *_: None  # (name, folder, limit in bytes)
    storage_problem: Callable[[], str] = str  # why nothing can be stored at present; empty if it can
    finish: Callable[[], None] = lambda: None  # the work is done: ends a process of its own

    @property
    def connect(self) -> ComponentConnector:
        """For a component with its own identity."""
        return self.access.connect

    @property
    def trust(self) -> keyring.Keyring:
        return self.access.keys

    @property
    def bus(self) -> api.Bus:
        return self._domain.bus

    @property
    def fork_server(self) -> fork_server.ForkServer:
        return self._domain.fork_server

    @property
    def report(self) -> membership.MachineReport:
        """Of this machine, for the others."""
        return self._domain.report

    @property
    def _domain(self) -> InDomain:
        if self.in_domain is None:
            raise errors.InvariantViolation("this component runs in the process of a domain only")
        return self.in_domain

    def config(self, component: str, **changes: Any) -> component_config.ComponentConfig:
        """For a process that runs ``component``. Its health pages are on a free port."""
        made = msgspec.structs.replace(self.template(), component=component, **changes)
        pages = msgspec.structs.replace(made.settings.health, port=0)
        settings = msgspec.structs.replace(made.settings, health=pages)
        return msgspec.structs.replace(made, settings=settings)

    def listen(self, endpoint: endpoints.Endpoint) -> socket.socket:
        """The socket that this process was started with, or a new one. Blocks."""
        if self.listener is None:
            return endpoint.listen()
        inherited = socket.socket(fileno=os.dup(self.listener))  # not inherited further
        os.close(self.listener)
        return inherited

    def record_child(self, name: str, pid: int) -> None:
        """The domain ends what a former process of it has left; other processes have no successor. Blocks."""
        if self.in_domain is not None:
            self.folder.record_child(name, pid)
