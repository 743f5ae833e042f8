"""The configuration of processes that the fork server starts.

The domain's process makes it, and does not import what they run (`worker`).
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from muster.app import certificates, home, identities
from muster.app.brokers import addresses
from muster.app.supervisor import component_config
from muster.bus.direct import listener
from muster.trust.permissions import roles

if TYPE_CHECKING:
    from muster.app.components import context as context_


class DirectPort(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process accepts direct connections; ``port`` None: nowhere."""

    port: int | None = None
    host: str = "127.0.0.1"
    names: tuple[str, ...] = ()  # to announce
    brokers: str = ""  # the folder of this machine's brokers
    cert: str = ""
    cert_key: str = ""


class WorkerConfig(component_config.ComponentConfig, frozen=True, kw_only=True, omit_defaults=True):
    """``component``: registry, manager, agent or information-node. ``folder``: of an agent. ``log_share``:
    its log has this fraction of the budget for the logs of child processes."""

    folder: str = ""
    sensor: str = ""
    direct: DirectPort = DirectPort()
    log_share: int = 1

    @property
    def place(self) -> home.DomainFolder:
        return home.DomainFolder(self.settings.domain.folder.absolute())

    @property
    def log_file(self) -> pathlib.Path:
        return self.place.logs / f"{self.name}.log"


def configure(
    context: context_.ComponentContext,
    kind: str,
    identity: str,
    role: roles.Role,
    service: Mapping[str, msgspec.Struct],
    **more: Any,
) -> WorkerConfig:
    """``service``: the section of its settings. Blocks."""
    made = context.config(kind, identity=identity)
    return WorkerConfig(
        **msgspec.structs.asdict(made)
        | {
            "settings": msgspec.structs.replace(made.settings, **service),
            "creds": str(identities.credentials_file(context.trust, identity, role)),
        }
        | more
    )


def direct_port(context: context_.ComponentContext, ports: Sequence[int], number: int) -> DirectPort:
    """Of process ``number`` of a service, as the settings say. Blocks."""
    base, port = context.settings, listener.port_of(ports, number)
    if port is None or (base.bus.servers and not context.trust.signs):  # it would not learn of revocations
        return DirectPort()
    tls = None
    if not base.bus.servers and base.bus.uses_tls:
        tls = certificates.broker_tls(base)
    return DirectPort(
        port=port,
        host=base.bus.host,
        names=tuple(addresses.reachable(base.bus)),
        brokers=str(context.folder.brokers),
        cert=str(tls.cert_file) if tls else "",
        cert_key=str(tls.key_file) if tls else "",
    )
