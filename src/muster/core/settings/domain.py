"""The settings that every process of a domain shares; `muster.app` adds the services' own sections.

domain      identity and folder of the domain
bus         brokers of the domain or external ones, behaviour of clients
trust       keys, certificates, credentials
retention   a budget for every stream, log and file
log, health log output and health endpoints of a process
"""

from __future__ import annotations

import pathlib
from typing import Annotated, Literal

import msgspec

from muster.core import errors, files, subjects
from muster.core.net import hosts
from muster.core.settings import bus as settings_bus
from muster.core.settings import retention as settings_retention
from muster.core.settings import sections

doc = sections.field_doc

_DAY_S = 86400.0


class DomainSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """The identity of the domain and its folder on this machine."""

    name: Annotated[
        str,
        doc(
            "Name of the domain. It is part of file paths and of the names of its account and "
            "certificates. A changed name creates a new domain next to the old one."
        ),
    ] = "local"
    data_dir: Annotated[
        sections.FilePath,
        doc(
            "The domain stores all its data on this machine in the folder DATA_DIR/NAME. Use a disk "
            "with a reliable and fast sync: each durable publish waits for one. A relative path in a "
            "settings file is relative to the folder of that file."
        ),
    ] = "~/.local/share/muster"
    zone: Annotated[
        str,
        doc(
            "Machines that tend to fail together (a rack, a room) share a zone. Replicas are spread "
            "over zones. The loss of all machines of a zone freezes action there instead of moving its "
            "load: a zone that is too wide freezes too much, and one that is too narrow protects "
            "against nothing."
        ),
    ] = "default"

    def __post_init__(self) -> None:
        subjects.token(self.name)
        subjects.token(self.zone)

    @property
    def folder(self) -> pathlib.Path:
        return files.expanded(self.data_dir) / self.name


class TrustSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """Keys, certificates and credentials."""

    keys_dir: Annotated[
        str,
        doc(
            "Folder of private keys, readable by its owner only. A relative path is relative to the "
            "folder of the domain. The operator key in it is the root of the domain: store a copy on "
            "another machine."
        ),
    ] = "keys"
    ca_lifetime_s: Annotated[
        float,
        doc(
            "Lifetime of the domain's certificate authority. Every client needs the certificate of a "
            "new one.",
            gt=0,
        ),
    ] = 3650 * _DAY_S
    certificate_lifetime_s: Annotated[
        float,
        doc(
            "Lifetime of a broker certificate. A shorter lifetime limits the use of a stolen key, but "
            "a domain that was stopped for longer than the remaining lifetime must renew the "
            "certificate before brokers can communicate.",
            gt=0,
        ),
    ] = 90 * _DAY_S
    renew_at: Annotated[
        sections.Fraction,
        doc(
            "A certificate is renewed when this share of its life is over: 0.66 leaves a third to notice "
            "failure."
        ),
    ] = 0.66
    credential_lifetime_s: Annotated[
        float,
        doc(
            "Lifetime of the credentials of a process. 0: until they are revoked. Shorter lifetimes "
            "require timely renewal.",
            ge=0,
        ),
    ] = 0.0
    agent_lifetime_s: Annotated[
        float,
        doc(
            "Lifetime of the credentials of machines that joined with a token; they renew them after a "
            "quarter of it. 0: until they are revoked. At most 8,000 machines can be replaced within this "
            "time and a day.",
            ge=0,
        ),
    ] = 14 * 86400.0
    grant_lifetime_s: Annotated[
        float,
        doc(
            "Maximum lifetime of a grant; notifiers refuse one that is valid for longer. A revocation "
            "that does not reach a notifier takes effect at the latest after this time.",
            gt=0,
        ),
    ] = 30 * _DAY_S


class LogSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """Log output of a process."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        doc("Least severity written. `debug` writes a line for each message handled: not under load."),
    ] = "info"
    format: Annotated[
        Literal["auto", "text", "json"],
        doc(
            "`text` for people, `json` (one object a line) for programs. `auto`: text on a terminal, else "
            "JSON."
        ),
    ] = "auto"


class HealthSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """The small HTTP server with /livez, /readyz and /metrics that every process has."""

    enabled: Annotated[bool, doc("Enables the health endpoints.")] = True
    host: Annotated[
        str,
        doc(
            "Address to listen on. The endpoints need no login: beyond loopback every host that "
            "reaches the address can read them."
        ),
    ] = "127.0.0.1"
    port: Annotated[
        hosts.Port,
        doc(
            "Port of the domain process. 0: a free port. Processes that it starts always use free "
            "ports; `muster status` shows all of them, and run/pages/ lists them in the format of "
            "Prometheus."
        ),
    ] = 0
    otlp_url: Annotated[
        str,
        doc(
            "Collector that receives metrics, log events, traces and the activity log by OTLP over HTTP "
            "(`http://127.0.0.1:4318`). Empty: none. What it does not accept is counted and discarded."
        ),
    ] = ""
    otlp_signals: Annotated[
        tuple[Literal["metrics", "logs", "traces", "activities"], ...],
        doc(
            "What that collector receives: metrics; log events of all processes; traces of requests; the "
            "activity log, as log records."
        ),
    ] = ("metrics", "logs", "traces", "activities")
    otlp_period_s: Annotated[float, doc("Between two reports of metrics to that collector.", ge=1)] = 30.0
    remote_write_url: Annotated[
        str,
        doc(
            "Address that receives metrics by Prometheus remote write "
            "(`http://127.0.0.1:9090/api/v1/write`), in addition to the endpoints. Empty: none."
        ),
    ] = ""
    remote_write_period_s: Annotated[float, doc("Between two of these reports.", ge=1)] = 30.0

    def __post_init__(self) -> None:
        for name in ("otlp_url", "remote_write_url"):
            url = getattr(self, name)
            if url and not url.startswith(("http://", "https://")):
                raise errors.InvalidInput(f"{name}: {url!r} is not an http:// or https:// address")
            hosts.without_password(url, f"health.{name}", "run a collector on this host that has one")


class BaseSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """The settings that every process of a domain shares. Subclasses add sections."""

    domain: DomainSettings = msgspec.field(default_factory=DomainSettings)
    bus: settings_bus.BusSettings = msgspec.field(default_factory=settings_bus.BusSettings)
    trust: TrustSettings = msgspec.field(default_factory=TrustSettings)
    retention: settings_retention.RetentionSettings = msgspec.field(
        default_factory=settings_retention.RetentionSettings
    )
    log: LogSettings = msgspec.field(default_factory=LogSettings)
    health: HealthSettings = msgspec.field(default_factory=HealthSettings)

    def __post_init__(self) -> None:
        reserved = self.retention.reserved_bytes()
        if not self.bus.servers and reserved > self.bus.storage_disk_bytes:
            raise errors.InvalidInput(
                f"the stream budgets in [retention] sum up to {reserved} bytes, over "
                f"bus.storage_disk_bytes = {self.bus.storage_disk_bytes}: raise the one or lower the others"
            )

    @property
    def keys_folder(self) -> pathlib.Path:
        return self.domain.folder / files.expanded(self.trust.keys_dir)
