"""Diagnostic checks: each reports a finding and, if needed, advice.

The checks depend on the target: a home, a machine without one, or a profile for a domain elsewhere. A check
changes nothing. Its result is ``ok``, ``warning`` (works, but will cause problems) or ``fault`` (does not
work). A check that raises an exception is a fault itself; the others continue.
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
import ssl
import stat
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

from muster import connection
from muster.app import certificates, home, identities
from muster.app import settings as app_settings
from muster.app.components import bootstrap_client
from muster.app.machines import membership
from muster.app.operations import listen_ports, queue_owners, rule_files
from muster.bus import api
from muster.bus.brokers import binary
from muster.bus.client import client
from muster.bus.http import client as http_client
from muster.bus.http import health as http_health
from muster.core import errors, health, units
from muster.core.reports import columns
from muster.core.settings import retention
from muster.manage import client as manage_client
from muster.trust import credentials as credentials_
from muster.trust.permissions import roles

OK, WARNING, FAULT = "ok", "warning", "fault"
DAY_S = 86400.0
SOON_S = 14 * DAY_S
SKEW_S = 1.0
EARLIEST_S = 1_735_689_600  # the start of 2025: an earlier clock is certainly wrong
TIME_ERROR = 5
OPEN_FILES = 4096
ANSWER_S = 1.0
SHOWN_MAX = 8
LOOKED_AT_MAX = 200
REGISTRY_S = 5.0
CHECK_S = 10.0  # for each check: brokers without a majority do not refuse, they do not reply
NAMED_MAX = 5
REPORTS_S = 60.0  # of reports, to know their rate


@dataclass(frozen=True, slots=True)
class CheckResult:
    check: str
    state: str
    finding: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class ConnectionRoute:
    """How to connect to a domain: by a profile, or to the domain of this home."""

    servers: tuple[str, ...]
    locator: str = ""
    creds: pathlib.Path | None = None
    ca: str = ""
    proxy: str = ""


@dataclass(frozen=True, slots=True)
class DoctorTarget:
    place: home.Home
    settings: app_settings.Settings
    running: home.RunningDomain | None
    profile: ConnectionRoute | None = None

    @property
    def folder(self) -> pathlib.Path:
        return self.settings.domain.folder


CheckOutcome = tuple[str, str, str]
Check = Callable[[DoctorTarget], Awaitable[CheckOutcome]]
BusCheck = Callable[[DoctorTarget, api.Bus], Awaitable[CheckOutcome]]  # of a domain that runs


async def run_checks(target: DoctorTarget) -> list[CheckResult]:
    """All results, in a useful order."""
    if target.profile is not None:
        checks: tuple[Check, ...] = (python, clock, credentials, brokers)
    elif target.place.settings_file.is_file():
        checks = CHECKS
    else:
        checks = (*MACHINE, ports, home_)
    results = [await _result(check, check(target)) for check in checks]
    if checks is not CHECKS:
        return results
    if target.running is None:
        return results + [CheckResult(_name(check), OK, "the domain is not running") for check in BUS_CHECKS]
    try:
        route = await asyncio.to_thread(_local_route, target)
        async with await _connect(route) as bus:
            return results + [await _result(check, check(target, bus)) for check in BUS_CHECKS]
    except errors.MusterError as error:
        return [*results, CheckResult("bus", FAULT, error.message, error.hint or "")]


def _name(check: Callable[..., object]) -> str:
    return check.__name__.replace("_", " ").strip()


async def _result(check: Callable[..., object], outcome: Awaitable[CheckOutcome]) -> CheckResult:
    try:
        async with asyncio.timeout(CHECK_S):
            return CheckResult(_name(check), *await outcome)
    except errors.MusterError as error:
        return CheckResult(_name(check), FAULT, error.message, error.hint or "")
    except TimeoutError:
        return CheckResult(_name(check), FAULT, f"no result within {CHECK_S:g} s")
    except Exception as error:  # noqa: BLE001  (a failing check must not hide the others)
        return CheckResult(_name(check), FAULT, f"{type(error).__name__}: {error}", "report this")


async def python(_: DoctorTarget) -> CheckOutcome:
    return OK, f"{platform.python_version()} in {sys.prefix}", ""


async def broker_program(target: DoctorTarget) -> CheckOutcome:
    named = target.settings.bus.binary
    program = await binary.find(pathlib.Path(named) if named else None)
    return OK, f"{program.path.name} {binary.show(program.version)}", ""


async def extras(target: DoctorTarget) -> CheckOutcome:
    """Packages that the settings need and that are not installed."""
    settings = target.settings
    needs = {
        "monitor": ("pyarrow", settings.channel.enabled or settings.sensor.enabled),
        "spark": ("pyspark", settings.pipeline.enabled),
    }
    missing = [
        extra for extra, (module, needed) in needs.items() if needed and not importlib.util.find_spec(module)
    ]
    if missing:
        return (
            FAULT,
            f"the settings need {', '.join(missing)}",
            f"pip install 'muster-fabric[{','.join(missing)}]'",
        )
    return OK, "all required packages are installed", ""


async def java(target: DoctorTarget) -> CheckOutcome:
    if not target.settings.pipeline.enabled and not importlib.util.find_spec("pyspark"):
        return OK, "not needed: Spark is not used", ""
    from muster.pipeline.source import java_runtime

    with tempfile.TemporaryDirectory() as cache:
        runtime = await asyncio.to_thread(java_runtime.find, pathlib.Path(cache))
    return OK, f"Java {runtime.version}, from {runtime.origin}", ""


async def clock(_: DoctorTarget) -> CheckOutcome:
    if time.time() < EARLIEST_S:
        return FAULT, time.strftime("%Y-%m-%d"), "set the clock: credentials and certificates depend on it"
    if not await asyncio.to_thread(_is_synchronised):
        return (
            WARNING,
            "not synchronised",
            "run chrony or systemd-timesyncd; expiry dates depend on the clock",
        )
    return OK, "synchronised by the system", ""


async def disk(target: DoctorTarget) -> CheckOutcome:
    folder = next(parent for parent in (target.folder, *target.folder.parents) if parent.exists())
    places = [place for place in (home.DomainFolder(target.folder).brokers, folder) if place.exists()]
    folder, usage = min(
        ((place, shutil.disk_usage(place)) for place in places), key=lambda disk: disk[1].free
    )
    reserved = target.settings.retention.reserved_bytes() if not target.settings.bus.servers else 0
    free = f"{units.rounded_size(usage.free)} free in {folder}"
    if usage.free < 1 << 30:
        return FAULT, free, "free disk space, or change domain.data_dir"
    if usage.free < reserved:
        advice = "reduce [retention], or free disk space: streams may grow to this size"
        return WARNING, f"{free}, with budgets of {units.rounded_size(reserved)}", advice
    return OK, free, ""


async def open_files(target: DoctorTarget) -> CheckOutcome:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        return WARNING, f"at most {soft}", f"raise the limit (ulimit -n {OPEN_FILES}): each client needs one"
    return OK, f"at most {soft}", ""


async def keys(target: DoctorTarget) -> CheckOutcome:
    folder = target.settings.keys_folder
    trust = await asyncio.to_thread(identities.open_keyring, target.settings)
    loose = await asyncio.to_thread(_readable_by_others, folder)
    if loose:
        return FAULT, f"other users can read {loose}", f"chmod -R go-rwx {folder}"
    await asyncio.to_thread(identities.check_complete, trust, target.settings)
    records = [  # not one-time tokens of enrolments: they are meant to expire
        record for record in await asyncio.to_thread(trust.records) if record.role != roles.Role.JOINING
    ]
    ending = [
        record.identity
        for record in records
        if record.status != "revoked"
        and record.expires_at is not None
        and record.expires_at - time.time() < SOON_S
        # Machines that joined have their own keys, and renew them themselves.
        and (record.role != roles.Role.AGENT or trust.credentials_path(record.identity).exists())
    ]
    if ending:
        return (
            WARNING,
            f"expired, or expiring within 14 days: {', '.join(ending[:8])}",
            "run `muster creds renew NAME --to FILE` for each",
        )
    return OK, f"{len(records)} credentials, none expiring soon", ""


async def tls(target: DoctorTarget) -> CheckOutcome:
    settings = target.settings
    if settings.bus.servers or not settings.bus.uses_tls:
        return OK, "not used: the brokers listen on loopback, or are external", ""
    report = await asyncio.to_thread(certificates.report, settings)
    finding = certificates.warning(report)
    if finding:
        return (
            WARNING,
            finding,
            "start the domain: it renews its certificates; see the guides for the authority",
        )
    return OK, f"{len(report)} certificates", ""


async def home_(target: DoctorTarget) -> CheckOutcome:
    return WARNING, f"no home in {target.place.root}", "`muster init` creates one"


async def credentials(target: DoctorTarget) -> CheckOutcome:
    """The credentials of the profile."""
    assert target.profile is not None
    if target.profile.creds is None:
        return OK, "the profile has no credentials", ""
    loaded = await asyncio.to_thread(credentials_.Credentials.load, target.profile.creds)
    advice = f"run `muster creds issue {loaded.identity} --to FILE` on the domain's machine"
    try:
        loaded.check(time.time())
    except errors.Unauthorized as error:
        return FAULT, error.message, advice
    if loaded.claims.exp and loaded.claims.exp - time.time() < SOON_S:
        return WARNING, f"credentials of {loaded.identity} expire within 14 days", advice
    return OK, f"credentials of {loaded.identity}", ""


async def ports(target: DoctorTarget) -> CheckOutcome:
    if target.running is not None:
        return OK, "in use by the domain", ""
    configured = listen_ports.configured(target.settings)
    taken = [f"{host}:{port}" for host, port in configured if not listen_ports.is_free(host, port)]
    if taken:
        advice = "stop the process that uses it (`ss -ltnp` shows it), or change the port in muster.toml"
        return FAULT, f"in use: {', '.join(taken)}", advice
    return OK, "free", ""


async def domain_(target: DoctorTarget) -> CheckOutcome:
    running = target.running
    if running is None:
        return WARNING, "not running", "start it with `muster up --detach`"
    if running.health_url is None:
        return OK, f"running (pid {running.pid}); its health pages are disabled", ""
    is_ready, bad = await _readiness(running.health_url)
    finding = "; ".join(f"{name}: {words}" for name, words in bad.items())
    if not is_ready:
        return FAULT, f"not ready: {finding}", "see `muster status` and the logs"
    if bad:
        failed = any(words.startswith(health.HealthState.FAILED.value) for words in bad.values())
        return FAULT if failed else WARNING, finding, "see `muster status` and the logs"
    return OK, f"running and ready (pid {running.pid})", ""


async def _readiness(url: str) -> tuple[bool, dict[str, str]]:
    """Whether a process is ready, and the state and reason of each part that is not up."""
    answer = await http_client.get(f"{url}/readyz")
    parts = answer.json()["parts"].items()
    bad = {name: f"{part['state']} {part['reason']}".strip() for name, part in parts if part["state"] != "up"}
    return answer.status == 200, bad


async def processes(target: DoctorTarget) -> CheckOutcome:
    """Whether the other processes of the domain on this machine are ready."""
    endpoints = await asyncio.to_thread(
        lambda: list(http_health.advertised(home.DomainFolder(target.folder).pages))
    )
    bad: list[str] = []
    for endpoint in endpoints:
        try:
            is_ready, parts = await _readiness(endpoint.url)
        except errors.MusterError as error:
            bad.append(f"{endpoint.process} (pid {endpoint.pid}) does not reply: {error.message}")
            continue
        if not is_ready:
            faults = ", ".join(f"{name} {words}" for name, words in parts.items())
            bad.append(f"{endpoint.process} (pid {endpoint.pid}) is not ready: {faults}")
    if bad:
        return FAULT, "; ".join(bad), "see the log of the process; its supervisor restarts a frozen one"
    return OK, f"{len(endpoints)} of {len(endpoints)} are ready", ""


async def brokers(target: DoctorTarget) -> CheckOutcome:
    """Whether each broker replies, and whether its clock agrees with ours."""
    route = target.profile
    if route is None:
        route = await asyncio.to_thread(_local_route, target)
    if not route.servers and not route.locator:
        return OK, "no brokers are running", ""
    creds = await asyncio.to_thread(credentials_.Credentials.load, route.creds) if route.creds else None
    tls_context = await asyncio.to_thread(ssl.create_default_context, cafile=route.ca) if route.ca else None
    silent: list[str] = []
    clocks: dict[str, float] = {}
    for url in route.servers or (route.locator,):
        try:
            async with await connection.connect(
                route.servers and url,
                locator=route.locator or None,
                creds=creds,
                tls=tls_context,
                proxy=route.proxy or None,
            ) as bus:
                await bus.flush()
                if creds is not None and creds.sees_connections:
                    clocks |= await _clocks(bus, len(route.servers))
        except errors.Unavailable as error:
            silent.append(f"{url}: {error.message}")
    count = len(route.servers or (route.locator,))
    if silent:
        return (WARNING if len(silent) < count else FAULT), "; ".join(silent), _broker_advice(target)
    astray = [f"{name} by {ahead_s:+.1f} s" for name, ahead_s in clocks.items() if abs(ahead_s) > SKEW_S]
    if astray:
        advice = "synchronise the clocks of both machines with chrony or systemd-timesyncd"
        return WARNING, f"clocks differ from this machine's: {', '.join(astray)}", advice
    return OK, f"{count} of {count} reply", ""


async def rules(target: DoctorTarget) -> CheckOutcome:
    """Whether the rule files that the settings name are valid."""
    files = await asyncio.to_thread(rule_files.check, target.settings)
    return OK, f"{units.format_count(len(files), 'file')} of rules, valid", ""


async def reports(target: DoctorTarget, bus: api.Bus) -> CheckOutcome:
    """Whether the stream of reports holds as many hours as it should, at the rate of what it has."""
    try:
        stream = await bus.open_stream(columns.REPORTS_STREAM)
        state = await stream.state()
        times_s = [
            (await stream.get(sequence)).stored_at_ns / 1e9
            for sequence in (state.first_sequence, state.last_sequence)
            if state.messages > 1
        ]
        limits = {budget.stream: budget.limit_bytes for budget in await bus.budgets()}
    except errors.NotFound:
        return OK, "there are none", ""
    limit_bytes = limits[columns.REPORTS_STREAM]
    return judge_reports(target.settings.retention, state.bytes, limit_bytes, times_s)


def judge_reports(
    settings: retention.RetentionSettings, used_bytes: int, limit_bytes: int, times_s: list[float]
) -> CheckOutcome:
    """``times_s``: when the first and the last message were stored; empty if there are less than two."""
    span_s = times_s[-1] - times_s[0] if times_s else 0.0
    if span_s < REPORTS_S:
        return OK, "too few to know for how long the stream holds them", ""
    bytes_s = used_bytes / span_s
    held_s = limit_bytes / bytes_s
    holds = (
        f"the stream holds the reports of {units.rounded_duration(held_s)} at {units.rounded_size(bytes_s)}/s"
    )
    if held_s >= settings.report_hours * 3600:
        return OK, holds, ""
    needed = int(1.1 * bytes_s * settings.report_hours * 3600)
    machines = (
        -(-needed // retention.report_bytes(1000, settings.report_period_s, settings.report_hours)) * 1000
    )
    return (
        WARNING,
        f"{holds}, less than "
        f"retention.report_hours = {settings.report_hours:g}: the pipeline may not be down for longer",
        f"set retention.machines = {machines} or retention.reports.max_bytes = {needed}, "
        "and bus.storage_disk_bytes accordingly",
    )


async def streams(target: DoctorTarget, bus: api.Bus) -> CheckOutcome:
    """Whether all replicas of the streams are current, and whether their budgets have room."""
    budgets = await bus.budgets()
    if not budgets:
        return OK, "there are none", ""
    behind: dict[str, list[str]] = {}
    for budget in budgets:
        for name in budget.behind:
            behind.setdefault(name, []).append(budget.stream)
    used, limit = (sum(getattr(of, name) for of in budgets) for name in ("used_bytes", "limit_bytes"))
    fullest = budgets[0]  # they are sorted
    room = (
        f"{units.rounded_size(used)} of {units.rounded_size(limit)} in {len(budgets)} streams, the fullest "
        f"{fullest.stream} with {fullest.used_ratio:.0%}"
    )
    if behind:
        shown = "; ".join(f"{name} for {len(names)} streams" for name, names in sorted(behind.items()))
        return WARNING, f"replicas are not current: {shown}; {room}", "see that these brokers run"
    if fullest.used_ratio >= target.settings.retention.alert_at:
        return WARNING, room, f"`muster status` lists all budgets; [retention] sets that of {fullest.stream}"
    return OK, room, ""


async def machines(target: DoctorTarget, bus: api.Bus) -> CheckOutcome:
    """Whether each machine of the domain has been heard, and works."""
    known = await asyncio.to_thread(membership.load, target.folder)
    if known is None:
        return OK, "this domain is on one machine", ""
    try:
        rows = await bootstrap_client.BootstrapClient(bus, timeout_s=REGISTRY_S).machines()
    except errors.Unavailable:
        first = known.machines[0].name
        return (
            FAULT,
            f"{first}, which signs accounts, does not reply: nothing can join or be revoked",
            "start it, or see docs/guides/three-machines.md",
        )
    silent = [f"{row.name} has not been heard for {row.age_s:.0f} s" for row in rows if row.state == "silent"]
    late = [f"{row.name}: {row.report.problem}" for row in rows if row.report and row.state == "late"]
    if silent or late:
        return (
            FAULT if silent else WARNING,
            "; ".join(silent + late),
            "if a machine is lost: `muster machine remove NAME`, then let another one join",
        )
    if reason := known.unreplicated():
        return WARNING if len(rows) > 1 else OK, reason if len(rows) > 1 else "one machine", ""
    return OK, f"{len(rows)} of {len(rows)} work", ""


async def queues(target: DoctorTarget, bus: api.Bus) -> CheckOutcome:
    """Whether each partition of the queues has a dispatcher."""
    if not target.settings.message.enabled:
        return OK, "no dispatcher runs here", ""
    problem, finding, advice = await queue_owners.examine(bus, target.settings.message.partitions)
    return FAULT if problem else WARNING if advice else OK, finding, advice


async def resources(target: DoctorTarget, bus: api.Bus) -> CheckOutcome:
    """Which resources failed, cannot be reached, or are down against their desired state."""
    if not target.settings.manage.enabled:
        return OK, "no registry runs here", ""
    manage = manage_client.ManageClient(bus)
    failed = (await manage.enumerate(where="state = 'failed'", limit=LOOKED_AT_MAX)).items
    late = "state IN ('unknown', 'late', 'down')"
    others = (await manage.enumerate(where=late, limit=LOOKED_AT_MAX)).items
    summary = await manage.summary()
    bad = [*failed, *(row for row in others if row.state != "down" or row.desired == "up")]
    if not bad:
        return OK, f"{units.format_count(summary.resources, 'resource')}, none failed or out of reach", ""
    shown = [f"{row.name} on {row.agent}: {row.state} {row.reason}".strip() for row in bad[:SHOWN_MAX]]
    count = sum(summary.states.get(state, 0) for state in ("failed", "late", "unknown", "down"))
    hidden = count - summary.down_as_desired - len(shown)
    more = [f"{hidden} more (`muster get`)"] if hidden > 0 else []
    return (
        FAULT if failed else WARNING,
        "; ".join(shown + more),
        "see `muster describe NAME` and `muster logs NAME`",
    )


async def agents(target: DoctorTarget, bus: api.Bus) -> CheckOutcome:
    """Whether something runs on machines where it does not belong."""
    if not target.settings.manage.enabled:
        return OK, "no registry runs here", ""
    fleet = manage_client.ManageClient(bus, timeout_s=REGISTRY_S)
    orphans, forgotten = await fleet.orphans(), await fleet.forgotten()
    if orphans:
        shown = ", ".join(f"{row.name} on {row.agent} ({row.reason})" for row in orphans[:NAMED_MAX])
        return (
            WARNING,
            f"{len(orphans)} resources do not belong where they are: {shown}",
            "`muster agent orphans`",
        )
    if forgotten:
        names = ", ".join(agent.name for agent in forgotten[:NAMED_MAX])
        return (
            WARNING,
            f"forgotten, but not known to run nothing: {names}",
            "if they will not return, run `muster creds revoke NAME` for each",
        )
    return OK, "everything is where it belongs", ""


MACHINE: tuple[Check, ...] = (python, broker_program, extras, java, clock, disk, open_files)
CHECKS: tuple[Check, ...] = (*MACHINE, keys, tls, ports, rules, domain_, processes, brokers)
BUS_CHECKS: tuple[BusCheck, ...] = (machines, streams, reports, queues, resources, agents)


def _local_route(target: DoctorTarget) -> ConnectionRoute:
    """The route to the domain of this home, as its administrator. Blocks."""
    running = target.running
    servers = running.servers if running is not None else target.settings.bus.servers
    if not servers:
        return ConnectionRoute(())
    trust = identities.open_keyring(target.settings)
    role = identities.OWN[identities.ADMINISTRATOR]
    creds = identities.credentials_file(trust, identities.ADMINISTRATOR, role)
    ca = (running.ca or "") if running is not None else ""
    return ConnectionRoute(servers, creds=creds, ca=ca, proxy=target.settings.bus.proxy)


async def _connect(route: ConnectionRoute) -> api.Bus:
    creds = await asyncio.to_thread(credentials_.Credentials.load, route.creds) if route.creds else None
    tls_context = await asyncio.to_thread(ssl.create_default_context, cafile=route.ca) if route.ca else None
    return await connection.connect(route.servers, creds=creds, tls=tls_context, proxy=route.proxy or None)


async def _clocks(bus: api.Bus, brokers: int) -> dict[str, float]:
    """How far the clock of each broker that replies in time is ahead of ours, by broker name."""
    requested_at, began = time.time(), time.monotonic()
    with_time = await bus.gather(
        client.AUDIT_SUBJECT, b'{"limit": 1}', enough=max(1, brokers), timeout_s=ANSWER_S
    )
    took_s = time.monotonic() - began
    ahead = {}
    for reply in with_time:
        server = json.loads(reply.data)["server"]
        ahead_s = datetime.fromisoformat(server["time"]).timestamp() - requested_at
        # The broker read its clock between our request and the last reply.
        ahead[server["name"]] = ahead_s if ahead_s < 0 else max(0.0, ahead_s - took_s)
    return ahead


def _broker_advice(target: DoctorTarget) -> str:
    if target.profile is not None:
        return "check the address and the firewall, or contact the operator of the domain"
    if target.running is None or target.settings.bus.servers:
        return "bus.servers in muster.toml lists them: start them, or change the list"
    logs = home.DomainFolder(target.folder).logs
    return (
        "each machine restarts its own; if one of this machine does not return, "
        f"run `muster down && muster up --detach` (logs: {logs})"
    )


def _is_synchronised() -> bool:
    """The state reported by the kernel; true if it cannot be determined."""
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


def doctor_target(place: home.Home, settings: app_settings.Settings) -> DoctorTarget:
    return DoctorTarget(place, settings, home.DomainFolder(settings.domain.folder).running())


def worst(findings: list[CheckResult]) -> str:
    return max((result.state for result in findings), key=(OK, WARNING, FAULT).index, default=OK)
