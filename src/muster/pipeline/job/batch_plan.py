"""What follows from a micro-batch, before any of it is visible: verdicts, reports and messages. Pure.

`batch_commit` writes, publishes and saves what is planned here.  The same batch gives the same plan when it
is repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from muster.bus import api
from muster.core import errors, messages
from muster.core.reports import columns
from muster.pipeline import protocol, steps
from muster.pipeline.alerts import rules, tracker
from muster.pipeline.fleet import rollups
from muster.pipeline.job import query, window_rows
from muster.pipeline.source import shard_keys


def _own_rule(name: str, severity: messages.Severity, summary: str, *, for_s: float = 0.0) -> rules.AlertRule:
    """Of the pipeline itself: evaluated here, not by its condition."""
    return rules.AlertRule(
        name=name, scope="system", when="FALSE", severity=severity, summary=summary, for_s=for_s
    )


LOSS = _own_rule(
    "reports-lost",
    messages.Severity.CRITICAL,
    "the retention of the stream removed {value:.0f} messages with reports before they were read",
)
HISTORY = _own_rule(
    "history-full",
    messages.Severity.CRITICAL,
    "{value:.0f} rows of the last batch could not be written to the history",
)
STEPS = _own_rule(
    "step-failing",
    messages.Severity.WARNING,
    "{value:.0f} steps of pipeline.steps failed in the last batch: the log of the pipeline says why",
)
NOTIFICATIONS = _own_rule(
    "notifications-failing",
    messages.Severity.CRITICAL,
    "{value:.0f} notifications wait for contacts that do not accept them",
    for_s=60.0,
)
OWN_RULES = (HISTORY, LOSS, NOTIFICATIONS, STEPS)
REMOVED = "removed"  # scope of messages about removed machines
REMOVED_AT_ONCE = 1000  # in one message: names have up to 256 characters
REPORTS_AT_ONCE = 8000  # published while the next ones are encoded
RECONCILE_MS = 60_000  # after a new checkpoint: time for rules to become true again
LOSS_SHOWN_MS = 3_600_000  # so that the alert is seen, although the pipeline has caught up

RuleKey = tuple[str, str]  # a rule and its object


class EncodedReport(NamedTuple):
    scope: str
    name: str
    data: bytes
    outgoing: api.OutgoingMessage | None  # None: it cannot be published

    @classmethod
    def of(cls, pipeline: str, scope: str, name: str, at_ms: int, data: bytes) -> EncodedReport:
        """``data``: empty if it is too large."""
        try:
            subject = columns.result_subject(pipeline, scope, name) if data else ""
        except errors.InvalidInput:
            subject = ""
        message_id = f"{scope}:{name}:{at_ms}"
        outgoing = api.OutgoingMessage(subject, data, message_id=message_id) if subject else None
        return cls(scope, name, data, outgoing)

    @classmethod
    def encode(
        cls, pipeline: str, scope: str, name: str, at_ms: int, message: messages.WireMessage
    ) -> EncodedReport:
        try:
            data = messages.encode(message)
        except errors.LimitExceeded:
            data = b""
        return cls.of(pipeline, scope, name, at_ms, data)


@dataclass(slots=True)
class BatchPlan:
    """``totals``: of groups, zones and the system that remain; ``gone``: scopes and names of the others."""

    number: int
    received: window_rows.BatchRows
    system: list[rollups.ScopeTotals]
    totals: list[rollups.ScopeTotals]
    gone: list[tuple[str, str]]
    verdicts: list[tracker.RuleVerdict]
    clock_ms: int
    counts: dict[str, int]
    faults: dict[str, str]  # of steps
    on: Set[RuleKey] = field(default_factory=frozenset)  # before this batch

    @property
    def machines(self) -> int:
        return sum(output.machines for output in self.received.outputs)

    @property
    def removed(self) -> list[str]:
        """The machines that a user removed."""
        return [machine for output in self.received.outputs for machine in output.removed]

    def reports(self, pipeline: str) -> Iterator[list[EncodedReport]]:
        """In portions: some are published while the next ones are prepared."""
        reports = (report for part in self.received.parts for report in part.reports())
        while portion := [
            EncodedReport.of(pipeline, *report) for report in itertools.islice(reports, REPORTS_AT_ONCE)
        ]:
            yield portion
        made: list[EncodedReport] = []
        for many in self.system:
            groups = (
                other for other in self.totals if other.scope == "group" and other.from_ms == many.from_ms
            )
            report = rollups.system_report(many, groups)
            made.append(EncodedReport.encode(pipeline, "system", "", many.to_ms, report))
            if many.top:
                top = rollups.top_nodes(many)
                made.append(EncodedReport.encode(pipeline, "top", "", many.to_ms, top))
        if made:
            yield made

    def removals(self, pipeline: str) -> list[EncodedReport]:
        """Messages about removed machines."""
        removed, at_ms = self.removed, self.clock_ms
        return [
            EncodedReport.encode(
                pipeline,
                REMOVED,
                f"{self.number}-{start}",
                at_ms,
                protocol.RemovedMachines(
                    at_ms=at_ms, machines=tuple(removed[start : start + REMOVED_AT_ONCE])
                ),
            )
            for start in range(0, len(removed), REMOVED_AT_ONCE)
        ]


class BatchPlanner:
    """``open_alerts``: as of the last saved state. ``alerts_run``: the checkpoint whose state they follow."""

    def __init__(
        self,
        known: Sequence[rules.AlertRule],
        baselines: rollups.Baselines,
        *,
        top: int,
        window_ms: int,
        open_alerts: Iterable[messages.Alert],
        alerts_run: str,
    ) -> None:
        self.evaluator = rollups.ScopeRuleEvaluator(known, baselines)
        self.alerts_run = alerts_run
        self._top, self._window_ms = top, window_ms
        self._faults: dict[str, str] = {}  # of steps, in the last batch
        self._lost = (0, 0)  # the last messages that were lost: when, and how many
        for alert in open_alerts:
            if alert.rule == LOSS.name:  # it is shown for its time although the driver was restarted
                self._lost = alert.since_ms, int(alert.value or 0)

    def follow(self, run: str, on: Set[RuleKey]) -> None:
        """Plan the batches of this checkpoint from now on. ``on``: of rules that are true."""
        self._run = run
        # Alerts of a former checkpoint that were not evaluated since: the state of a new one cannot end them.
        self._unconfirmed = set(on) if self.alerts_run != run else set()
        self._reconcile_at_ms: int | None = None

    def plan(
        self,
        number: int,
        received: window_rows.BatchRows,
        codes: Sequence[steps.StepCode],
        on: Set[RuleKey],
    ) -> BatchPlan:
        """``codes``: steps of the user, for the system; ``on``: rules that are true before the batch."""
        system = rollups.scope_totals((share for part in received.parts for share in part.system), self._top)
        faults = received.faults() | steps.extend_groups(codes, system)
        totals = [*(many for part in received.parts for many in part.totals()), *system]
        changes = (change for output in received.outputs for change in output.changes)
        verdicts = [*rollups.node_verdicts(changes), *self.evaluator.evaluate(totals, on)]
        verdicts.sort(key=lambda verdict: verdict.at_ms)
        clock_ms = max((output.clock_ms for output in received.outputs), default=0)
        return BatchPlan(
            number,
            received,
            system,
            [many for many in totals if not many.gone],
            [(many.scope, many.name) for many in totals if many.gone],
            verdicts,
            clock_ms,
            received.counts(),
            faults,
            on,
        )

    def new_faults(self, plan: BatchPlan) -> dict[str, str]:
        """Of steps that did not fail in this way in the batch before."""
        return {step: why for step, why in plan.faults.items() if self._faults.get(step) != why}

    def conclude(self, plan: BatchPlan, waiting: Sequence[protocol.FailingContact]) -> None:
        """Add the verdicts about the pipeline itself, when it is known what the history has.

        ``waiting``: contacts that do not accept notifications.
        """
        counts, clock_ms, verdicts = plan.counts, plan.clock_ms, plan.verdicts

        def about(rule: rules.AlertRule, value: float, *, on: bool) -> None:
            verdicts.append(tracker.RuleVerdict(rule.name, "pipeline", on, clock_ms, value))

        if plan.totals or counts.get("rows"):  # there was something to write
            missing = sum(counts.get(name, 0) for name in (query.HISTORY_LOST, window_rows.NOT_STORED))
            about(HISTORY, float(missing), on=missing > 0)
            for step in plan.faults:
                counts[f"{steps.FAILED}{step}"] = counts.get(f"{steps.FAILED}{step}", 0) + 1
            self._faults = plan.faults
            about(STEPS, float(len(plan.faults)), on=bool(plan.faults))
        verdicts.append(self.about_loss(counts, clock_ms))
        about(NOTIFICATIONS, float(sum(contact.waiting for contact in waiting)), on=bool(waiting))
        verdicts += self.reconcile(verdicts, clock_ms)
        if plan.removed:
            abouts = {f"node:{machine}" for machine in plan.removed}
            verdicts += [
                tracker.RuleVerdict(rule, about_, False, clock_ms)
                for rule, about_ in plan.on
                if about_ in abouts
            ]
            counts["removed"] = len(plan.removed)

    def about_loss(self, counts: Mapping[str, int], clock_ms: int) -> tracker.RuleVerdict:
        if counts.get(shard_keys.LOST):
            self._lost = clock_ms, counts[shard_keys.LOST]
        at_ms, lost = self._lost
        is_shown = lost > 0 and clock_ms - at_ms < LOSS_SHOWN_MS
        return tracker.RuleVerdict(LOSS.name, "pipeline", is_shown, clock_ms, float(lost))

    def reconcile(self, verdicts: Sequence[tracker.RuleVerdict], clock_ms: int) -> list[tracker.RuleVerdict]:
        """End alerts of a former checkpoint that were not evaluated again: their objects are gone."""
        if self.alerts_run == self._run or not clock_ms:
            return []
        self._unconfirmed -= {(verdict.rule, verdict.about) for verdict in verdicts}
        if self._reconcile_at_ms is None:
            self._reconcile_at_ms = clock_ms + max(RECONCILE_MS, 3 * self._window_ms)
        if clock_ms < self._reconcile_at_ms:
            return []
        ended, self._unconfirmed, self.alerts_run = sorted(self._unconfirmed), set(), self._run
        return [tracker.RuleVerdict(rule, about, False, clock_ms) for rule, about in ended]
