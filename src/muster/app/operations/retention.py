"""Monitors budgets: streams, key/value buckets, files, and the disk.

Any process may create a stream; its limits are set here, from ``[retention]``, also after a change of the
settings. A budget that is used beyond ``retention.alert_at`` raises an alert, published on the bus as a
`muster.core.messages.Alert` and resolved when there is space again; full budgets are also counted. A
published alert may be missed, because the first ones precede any subscriber, so the domain's process also
lists open alerts (`open_alerts`, a verb of `muster.app.operations.control`). Nothing is deleted here: the
owner of each budget defines what happens when it is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.app.components import component
from muster.app.components import context as context_
from muster.bus import api
from muster.core import errors, messages, subjects, units
from muster.core.settings import domain, retention
from muster.core.telemetry import metrics
from muster.trust.permissions import roles

PERIOD_S = 10.0
FIRST_CHECK_S = 1.0  # of the start of the domain
RULE = "budget"
FULL = 0.99  # a stream that drops its oldest messages stays just below its limit


@dataclass(frozen=True, slots=True)
class BudgetUsage:
    """The usage of a budget. ``refuses``: writes are refused when it is full."""

    name: str
    used_bytes: int
    limit_bytes: int
    refuses: bool

    @property
    def ratio(self) -> float:
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0


@dataclass(frozen=True, slots=True)
class SelfLimitedFiles:
    """Files below a folder whose owner keeps them within a budget."""

    folder: Path
    limit_bytes: int


Severities = Mapping[str, messages.Severity]


def usage_severities(uses: Iterable[BudgetUsage], alert_at: float) -> dict[str, messages.Severity]:
    """Budgets that raise an alert, and its severity: full ones that refuse writes are critical."""
    return {
        use.name: messages.Severity.CRITICAL
        if use.refuses and use.ratio >= FULL
        else messages.Severity.WARNING
        for use in uses
        if use.ratio >= alert_at
    }


def alerts(
    before: Severities, now: Severities, uses: Sequence[BudgetUsage], at_ms: int
) -> list[messages.Alert]:
    """Alerts to publish: budgets whose severity is new, changed, or resolved."""
    use_of = {use.name: use for use in uses}
    due = []
    for name in sorted({*before, *now}):
        if before.get(name) is now.get(name):
            continue
        use, severity = use_of.get(name), now.get(name)
        due.append(
            messages.Alert(
                rule=RULE,
                about=f"budget:{name}",
                severity=severity or before[name],
                state=messages.AlertState.FIRING if severity else messages.AlertState.RESOLVED,
                since_ms=at_ms,
                at_ms=at_ms,
                value=use.ratio if use else None,
                reason=_reason(use) if use else "the budget no longer exists",
            )
        )
    return due


def _reason(use: BudgetUsage) -> str:
    consequence = (
        "writes are refused when it is full" if use.refuses else "the oldest data is dropped when it is full"
    )
    used, limit = units.rounded_size(use.used_bytes), units.rounded_size(use.limit_bytes)
    return f"{used} of {limit} are used; {consequence}"


def drifted_streams(
    budgets: Iterable[api.StreamBudget], settings: domain.BaseSettings, at_least: int = 0
) -> Iterator[tuple[str, retention.RetentionBudget, int]]:
    """Streams whose budget differs from the settings, and the budget and replicas that they should have.
    ``at_least``: of several machines, on which replicas of each stream are only added."""
    budgets = list(budgets)
    logs = sum(budget.stream in roles.STREAMS["message"] for budget in budgets)
    ours = settings.retention.streams(max(1, logs))
    for budget in budgets:
        replicas = max(budget.replicas, at_least) if at_least else settings.bus.replicas
        should = ours.get(budget.stream)
        if should is None and budget.replicas < at_least:  # of a user
            should = retention.RetentionBudget(
                max_bytes=budget.limit_bytes, max_age_s=budget.max_age_s, on_full=budget.on_full.value
            )
        if should is not None and (
            budget.limit_bytes,
            budget.max_age_s,
            budget.on_full.value,
            budget.replicas,
        ) != (should.max_bytes, should.max_age_s, should.on_full, replicas):
            yield budget.stream, should, replicas


class RetentionMonitor:
    """The component that checks budgets and raises alerts."""

    name = "budgets"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, *, period_s: float = PERIOD_S, replicas: Callable[[], int] = int) -> None:
        """``replicas``: that each stream has at least; 0: as in the settings."""
        self._period_s = period_s
        self._replicas = replicas
        self._is_checked = asyncio.Event()
        self._context: context_.ComponentContext
        self._measured: dict[str, list[BudgetUsage]] = {}  # by what was measured
        self._unknown: dict[str, str] = {}  # what could not be measured, and why
        self._severities: dict[str, messages.Severity] = {}
        self._open: dict[str, messages.Alert] = {}  # firing alerts, by subject
        self._folders: dict[str, SelfLimitedFiles] = {}
        self._unsettled: dict[str, str] = {}  # streams whose budget could not be set, and why
        self._used: metrics.Gauge
        self._limit: metrics.Gauge
        self._full: metrics.Counter

    def watch_folder(self, name: str, folder: Path, limit_bytes: int) -> None:
        """Monitor these files too; their owner drops the oldest when the budget is full."""
        self._folders[name] = SelfLimitedFiles(folder, limit_bytes)

    async def start(self, context: context_.ComponentContext) -> None:
        self._context = context
        self._used = context.metrics.gauge("budget_used_bytes", "Bytes used of each budget.", ("budget",))
        self._limit = context.metrics.gauge("budget_limit_bytes", "Size of each budget.", ("budget",))
        self._full = context.metrics.counter("budget_full", "Times a budget was found full.", ("budget",))
        context.tasks.loop("check", self._check_forever)
        # Streams without a leader delay it after a restart of all brokers. The domain does not wait for them.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CHECK_S):
                await self._is_checked.wait()

    async def stop(self) -> None:
        """The domain ends the task."""

    def health(self) -> component.ComponentHealth:
        rows = [
            {
                "name": use.name,
                "used_bytes": use.used_bytes,
                "limit_bytes": use.limit_bytes,
                "used_ratio": round(use.ratio, 4),
                "when_full": "refuses" if use.refuses else "drops the oldest",
            }
            for use in sorted(itertools.chain(*self._measured.values()), key=lambda use: -use.ratio)
        ]
        above = ", ".join(f"{name} ({severity.value})" for name, severity in sorted(self._severities.items()))
        reasons = [f"nearly full: {above}"] if above else []
        reasons += [f"{name} could not be measured: {why}" for name, why in self._unknown.items()]
        reasons += [f"{name} does not have its budget: {why}" for name, why in self._unsettled.items()]
        return component.ComponentHealth(reason="; ".join(reasons), facts={"budgets": rows})

    async def check(self) -> None:
        """Check all budgets once. What cannot be measured, as on a full disk, keeps its last
        values, and does not delay the others."""
        context = self._context
        self._measured["files"] = await asyncio.to_thread(_of_files, context, self._folders)
        self._unknown = {}
        try:
            self._measured["streams"] = await self._of_streams()
        except (errors.MusterError, OSError) as error:
            context.log.warning("budgets-unknown", of="streams", error=error)
            self._unknown["streams"] = str(error)
        uses = [*itertools.chain(*self._measured.values())]
        now = usage_severities(uses, context.settings.retention.alert_at)
        for use in uses:
            self._used.set(use.used_bytes, budget=use.name)
            self._limit.set(use.limit_bytes, budget=use.name)
            if use.ratio >= FULL:
                self._full.add(budget=use.name)
        for alert in alerts(self._severities, now, uses, int(time.time() * 1000)):
            context.log.warning("budget", about=alert.about, state=alert.state.value, reason=alert.reason)
            if alert.state is messages.AlertState.FIRING:
                self._open[alert.about] = alert
            else:
                self._open.pop(alert.about, None)
            await context.bus.publish(subjects.to_all("bus", "alert"), messages.encode(alert))
        self._severities = now

    async def _of_streams(self) -> list[BudgetUsage]:
        budgets = await self._settle(await self._context.bus.budgets())
        return [
            BudgetUsage(
                budget.stream,
                budget.used_bytes,
                budget.limit_bytes,
                refuses=budget.on_full is api.FullPolicy.REFUSE,
            )
            for budget in budgets
        ]

    def open_alerts(self) -> list[messages.Alert]:
        """The alerts that are firing now."""
        return list(self._open.values())

    async def _settle(self, budgets: list[api.StreamBudget]) -> list[api.StreamBudget]:
        """Set the budgets of the settings on streams; returns the resulting budgets."""
        settings = self._context.settings
        others = list(drifted_streams(budgets, settings, self._replicas()))
        names = {name for name, *_ in others}
        self._unsettled = {name: why for name, why in self._unsettled.items() if name in names}
        for name, should, replicas in others:
            try:
                await self._context.bus.limit(
                    name,
                    max_bytes=should.max_bytes,
                    max_age_s=should.max_age_s,
                    on_full=api.FullPolicy(should.on_full),
                    replicas=replicas,
                )
            except errors.NotFound:
                continue  # deleted meanwhile
            except (errors.InvalidInput, errors.Refused) as error:
                if self._unsettled.get(name) != error.message:
                    self._context.log.error("budget-not-set", stream=name, error=error)
                self._unsettled[name] = error.message
            else:
                self._context.log.info("budget-set", stream=name, max_bytes=should.max_bytes)
                self._unsettled.pop(name, None)
        return await self._context.bus.budgets() if others else budgets

    async def _check_forever(self) -> None:
        while True:
            try:
                await self.check()
            except (errors.MusterError, OSError) as error:  # retried in the next period
                self._context.log.warning("budgets-unknown", error=error)
            self._is_checked.set()
            await asyncio.sleep(self._period_s)


def _of_files(
    context: context_.ComponentContext, folders: Mapping[str, SelfLimitedFiles]
) -> list[BudgetUsage]:
    # Parts of the folder may be on disks of their own: the fullest counts.
    places = [context.folder.root, context.folder.brokers, *(kept.folder for kept in folders.values())]
    disks = [shutil.disk_usage(place) for place in places if place.exists()]
    disk = min(disks, key=lambda usage: usage.free / usage.total)
    logs = [*context.folder.logs.iterdir(), *context.folder.brokers.glob("*/broker.log*")]
    limit = context.settings.retention.logs.max_bytes
    return [
        BudgetUsage("log files", sum(map(_size, logs)), limit, refuses=False),
        BudgetUsage("disk", disk.total - disk.free, disk.total, refuses=True),
        *(
            BudgetUsage(name, sum(map(_size, kept.folder.rglob("*"))), kept.limit_bytes, refuses=False)
            for name, kept in folders.items()
            if kept.limit_bytes
        ),
    ]


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # its owner has just rotated it
        return 0
