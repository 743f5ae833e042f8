"""The doctor's checks: one question each, answered with what was found and, where needed, what to do.

What is looked at goes by what is there: a home, a machine that is to get one, or a profile, by which one
connects to a domain elsewhere.  A check looks and changes nothing.  It answers ``ok``, ``warning`` (works,
and will hurt) or ``fault`` (does not work); one that trips over something unforeseen is a fault of its own,
and the others go on.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import json
import pathlib
import platform
import resource
import shutil
import socket
import ssl
import stat
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from muster import connection
from muster.app import certificates, domain, home, identities
from muster.app import settings as app_settings
from muster.app.brokers import broker_configs
from muster.bus import api
from muster.bus.brokers import binary
from muster.bus.client import client
from muster.bus.http import client as http_client
from muster.core import errors
from muster.core.net import hosts
from muster.trust import credentials as credentials_

OK, WARNING, FAULT = "ok", "warning", "fault"
DAY_S = 86400.0
SOON_S = 14 * DAY_S
SKEW_S = 1.0
EARLIEST_S = 1_735_689_600  # the start of 2025: no machine's clock is right that says less
TIME_ERROR = 5
OPEN_FILES = 4096
ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    check: str
    state: str
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class ConnectionRoute:
    """How one connects to a domain: as a profile says, or to the one that runs here."""

    servers: tuple[str, ...]
    locator: str = ""
    creds: pathlib.Path | None = None
    ca: str = ""


@dataclass(frozen=True, slots=True)
class DoctorTarget:
    place: home.Home
    settings: app_settings.Settings
    running: home.RunningDomain | None
    profile: ConnectionRoute | None = None

    @property
    def folder(self) -> pathlib.Path:
        return self.settings.domain.folder


Answer = tuple[str, str, str]
Check = Callable[[DoctorTarget], Awaitable[Answer]]


async def run_checks(patient: DoctorTarget) -> list[CheckResult]:
    """All findings, in the order in which one would look."""
    if patient.profile is not None:
        checks: tuple[Check, ...] = (python, clock, credentials, brokers)
    elif patient.place.settings_file.is_file():
        checks = CHECKS
    else:
        checks = (*MACHINE, ports, home_)
    found = []
    for check in checks:
        name = check.__name__.replace("_", " ").strip()
        try:
            found.append(CheckResult(name, *await check(patient)))
        except errors.MusterError as error:
            found.append(CheckResult(name, FAULT, error.message, error.hint or ""))
        except Exception as error:  # noqa: BLE001  (a check that trips must not hide the others)
            found.append(CheckResult(name, FAULT, f"{type(error).__name__}: {error}", "report this"))
    return found


async def python(_: DoctorTarget) -> Answer:
    return OK, f"{platform.python_version()} in {sys.prefix}", ""


async def broker_program(patient: DoctorTarget) -> Answer:
    named = patient.settings.bus.binary
    found = await binary.find(pathlib.Path(named) if named else None)
    return OK, f"{found.path.name} {binary.show(found.version)}", ""


async def extras(patient: DoctorTarget) -> Answer:
    """What the settings ask for and is not installed."""
    settings = patient.settings
    wanted = {
        "postgres": ("psycopg", settings.store.url.startswith("postgres")),
        "monitor": ("pyarrow", settings.channel.enabled or settings.sensor.enabled),
        "spark": ("pyspark", settings.pipeline.enabled),
    }
    missing = [
        extra for extra, (module, needed) in wanted.items() if needed and not importlib.util.find_spec(module)
    ]
    if missing:
        return (
            FAULT,
            f"the settings need {', '.join(missing)}",
            f"pip install 'muster-fabric[{','.join(missing)}]'",
        )
    return OK, "all that the settings need", ""


async def java(patient: DoctorTarget) -> Answer:
    if not patient.settings.pipeline.enabled and not importlib.util.find_spec("pyspark"):
        return OK, "not needed: no Spark here", ""
    from muster.pipeline.source import java_runtime as java_

    with tempfile.TemporaryDirectory() as cache:
        found = await asyncio.to_thread(java_.find, pathlib.Path(cache))
    return OK, f"Java {found.version}, from {found.origin}", ""


async def clock(_: DoctorTarget) -> Answer:
    if time.time() < EARLIEST_S:
        return FAULT, time.strftime("%Y-%m-%d"), "set the clock: credentials and certificates have dates"
    if not await asyncio.to_thread(_is_synchronised):
        return (
            WARNING,
            "nothing keeps it right",
            "run chrony or systemd-timesyncd; leases need no clock, dates do",
        )
    return OK, "kept right by the system", ""


async def disk(patient: DoctorTarget) -> Answer:
    folder = next(one for one in (patient.folder, *patient.folder.parents) if one.exists())
    usage = shutil.disk_usage(folder)
    wanted = patient.settings.retention.reserved_bytes() if not patient.settings.bus.servers else 0
    free = f"{usage.free / 2**30:.1f} GiB free in {folder}"
    if usage.free < 1 << 30:
        return FAULT, free, "make room, or put domain.data_dir elsewhere"
    if usage.free < wanted:
        advice = "lower [retention], or make room: streams may grow to that"
        return WARNING, f"{free}, and budgets of {wanted / 2**30:.1f} GiB", advice
    return OK, free, ""


async def open_files(patient: DoctorTarget) -> Answer:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        return WARNING, f"at most {soft}", f"raise it (ulimit -n {OPEN_FILES}): each client costs one"
    return OK, f"at most {soft}", ""


async def keys(patient: DoctorTarget) -> Answer:
    folder = patient.settings.keys_folder
    trust = await asyncio.to_thread(identities.open_keyring, patient.settings)
    loose = await asyncio.to_thread(_readable_by_others, folder)
    if loose:
        return FAULT, f"others can read {loose}", f"chmod -R go-rwx {folder}"
    account = folder / "accounts" / patient.settings.domain.name
    roots = (folder / "keys/operator.seed", folder / "keys/signing.seed", account / "signing.seed")
    missing = [str(one) for one in roots if not await asyncio.to_thread(one.exists)]
    if missing:
        return FAULT, f"missing: {', '.join(missing)}", "restore from a backup; docs/guides/lost-keys.md"
    records = await asyncio.to_thread(trust.records)
    ending = [
        one.identity
        for one in records
        if one.status == "expired"
        or (one.status == "valid" and one.expires_at is not None and one.expires_at - time.time() < SOON_S)
    ]
    if ending:
        return (
            WARNING,
            f"ended, or end within 14 days: {', '.join(ending[:8])}",
            "`muster creds renew NAME --to FILE`, for each",
        )
    return OK, f"{len(records)} credentials, none near its end", ""


async def tls(patient: DoctorTarget) -> Answer:
    settings = patient.settings
    if settings.bus.servers or not settings.bus.uses_tls:
        return OK, "not used: the brokers listen on loopback, or are somebody else's", ""
    report = await asyncio.to_thread(certificates.report, settings)
    warned = [one for one in report if one.warning_days is not None]
    if warned:
        words = ", ".join(f"{one.name} ends in {max(0.0, one.days_left):.1f} days" for one in warned)
        return (
            WARNING,
            words,
            "start the domain: it renews what is due; the authority itself is a guide's matter",
        )
    return OK, f"{len(report)} certificates", ""


async def home_(patient: DoctorTarget) -> Answer:
    return WARNING, f"there is none in {patient.place.root}", "`muster init` makes one"


async def credentials(patient: DoctorTarget) -> Answer:
    """Those of the profile."""
    assert patient.profile is not None
    if patient.profile.creds is None:
        return OK, "the profile names none", ""
    found = await asyncio.to_thread(credentials_.Credentials.load, patient.profile.creds)
    advice = f"have `muster creds issue {found.identity} --to FILE` run on the domain's machine"
    try:
        found.check(time.time())
    except errors.Unauthorized as error:
        return FAULT, error.message, advice
    if found.claims.exp and found.claims.exp - time.time() < SOON_S:
        return WARNING, f"those of {found.identity} end within 14 days", advice
    return OK, f"those of {found.identity}", ""


async def ports(patient: DoctorTarget) -> Answer:
    if patient.running is not None:
        return OK, "the domain has them", ""
    taken = [f"{host}:{port}" for host, port in _ports(patient.settings) if not _is_free(host, port)]
    if taken:
        advice = "stop who has it (`ss -ltnp` names it), or choose another in muster.toml"
        return FAULT, f"taken: {', '.join(taken)}", advice
    return OK, "free", ""


async def store(patient: DoctorTarget) -> Answer:
    settings = patient.settings
    if settings.store.url.startswith("sqlite:") and not await asyncio.to_thread(patient.folder.exists):
        return OK, "made at the first start", ""
    async with await domain.open_store(settings) as opened:
        used = await opened.statistics()
    return OK, f"{used.record_bytes:,} bytes of records", ""


async def domain_(patient: DoctorTarget) -> Answer:
    running = patient.running
    if running is None:
        return WARNING, "does not run", "`muster up --detach`"
    if running.health_url is None:
        return OK, f"runs (pid {running.pid}); its health pages are off", ""
    answer = await http_client.get(f"{running.health_url}/readyz")
    parts = answer.json()["parts"]
    bad = [
        f"{name}: {one['state']} {one['reason']}".strip()
        for name, one in parts.items()
        if one["state"] != "up"
    ]
    if answer.status != 200:
        return FAULT, f"not ready: {'; '.join(bad)}", "see `muster status`, and the logs it names"
    if bad:
        return WARNING, "; ".join(bad), "see `muster status`"
    return OK, f"runs and is ready (pid {running.pid})", ""


async def brokers(patient: DoctorTarget) -> Answer:
    """Each of them; and whether their clocks agree with ours."""
    way = patient.profile
    if way is None:
        way = await asyncio.to_thread(_own_way, patient)
    if not way.servers and not way.locator:
        return OK, "none are up", ""
    creds = await asyncio.to_thread(credentials_.Credentials.load, way.creds) if way.creds else None
    believed = await asyncio.to_thread(ssl.create_default_context, cafile=way.ca) if way.ca else None
    silent: list[str] = []
    clocks: dict[str, float] = {}
    for url in way.servers or (way.locator,):
        try:
            async with await connection.connect(
                way.servers and url, locator=way.locator or None, creds=creds, tls=believed
            ) as bus:
                await bus.flush()
                if creds is not None and creds.sees_connections:
                    clocks |= await _clocks(bus, len(way.servers))
        except errors.Unavailable as error:
            silent.append(f"{url}: {error.message}")
    asked = len(way.servers or (way.locator,))
    if silent:
        return (WARNING if len(silent) < asked else FAULT), "; ".join(silent), _revive(patient)
    astray = [f"{name} by {ahead_s:+.1f} s" for name, ahead_s in clocks.items() if abs(ahead_s) > SKEW_S]
    if astray:
        advice = "have chrony or systemd-timesyncd keep the clocks of both machines"
        return WARNING, f"clocks differ from this machine's: {', '.join(astray)}", advice
    return OK, f"{asked} {'answers' if asked == 1 else 'answer'}", ""


MACHINE: tuple[Check, ...] = (python, broker_program, extras, java, clock, disk, open_files)
CHECKS: tuple[Check, ...] = (
    *MACHINE,
    keys,
    tls,
    ports,
    store,
    domain_,
    brokers,
)


def _own_way(patient: DoctorTarget) -> ConnectionRoute:
    """To the domain of this home, as its administrator. Blocks."""
    running = patient.running
    servers = running.servers if running is not None else patient.settings.bus.servers
    if not servers:
        return ConnectionRoute(())
    trust = identities.open_keyring(patient.settings)
    role = identities.OWN[identities.ADMINISTRATOR]
    creds = identities.credentials_file(trust, identities.ADMINISTRATOR, role)
    return ConnectionRoute(servers, creds=creds, ca=(running.ca or "") if running is not None else "")


async def _clocks(bus: api.Bus, brokers: int) -> dict[str, float]:
    """How far each broker's clock is ahead of ours, by its name: those that answer in time."""
    asked_at, began = time.time(), time.monotonic()
    with_time = await bus.gather(
        client.AUDIT_SUBJECT, b'{"limit": 1}', enough=max(1, brokers), timeout_s=ANSWER_S
    )
    took_s = time.monotonic() - began
    found = {}
    for one in with_time:
        server = json.loads(one.data)["server"]
        ahead_s = datetime.fromisoformat(server["time"]).timestamp() - asked_at
        # It looked at its clock some time between our question and the last answer.
        found[server["name"]] = ahead_s if ahead_s < 0 else max(0.0, ahead_s - took_s)
    return found


def _revive(patient: DoctorTarget) -> str:
    if patient.profile is not None:
        return "is the address right, and does a firewall let you through? Ask who runs the domain"
    if patient.running is None or patient.settings.bus.servers:
        return "bus.servers in muster.toml names them: start them, or name others"
    logs = home.DomainFolder(patient.folder).logs
    return f"the domain starts them anew; if not: `muster down && muster up --detach` (logs: {logs})"


def _is_synchronised() -> bool:
    """What the kernel says; where it cannot be asked, no complaint."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.adjtimex(ctypes.create_string_buffer(512)) != TIME_ERROR)
    except (OSError, AttributeError):
        return True


def _readable_by_others(folder: pathlib.Path) -> str:
    for path in (folder, *folder.rglob("*")):
        if path.lstat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) and not path.is_symlink():
            return str(path)
    return ""


def _ports(settings: app_settings.Settings) -> Iterator[tuple[str, int]]:
    bus = settings.bus
    if not bus.servers:
        for first in (bus.port, bus.websocket_port if bus.websocket else 0, bus.mqtt_port if bus.mqtt else 0):
            if first:
                yield from (
                    (bus.host, first + number) for number in range(broker_configs.broker_count(settings))
                )
    if bus.locator and bus.locator_port:
        yield bus.host, bus.locator_port
    web = settings.web
    if web.enabled and web.port and not hosts.is_loopback(web.host):  # on loopback a free one is taken
        yield web.host, web.port
    if settings.soap.enabled and settings.soap.port:
        yield settings.soap.host, settings.soap.port
    if settings.health.enabled and settings.health.port:
        yield settings.health.host, settings.health.port


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def doctor_target(place: home.Home, settings: app_settings.Settings) -> DoctorTarget:
    return DoctorTarget(place, settings, home.DomainFolder(settings.domain.folder).running())


def worst(findings: list[CheckResult]) -> str:
    return max((one.state for one in findings), key=(OK, WARNING, FAULT).index, default=OK)
