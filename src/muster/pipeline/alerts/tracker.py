"""Alert states, acknowledgements and silences. Pure.

An alert is identified by its rule and its object.  Its states and transitions, as a table (`NEXT`):

    (none) ──begins──> pending ──held──> firing ──acknowledge──> acknowledged
                                            │ ▲                        │
                                    silence │ │ unsilence              │
                                            ▼ │                        │
                                         silenced                      │
    and from each of them ──ends──> resolved, after which it is deleted

*Begins* and *ends* follow from the rule's predicates; *held* means that the condition has held for the time
that the rule requires.  When an alert fires first, its severity, labels, group and contacts are frozen: with
other labels its end would be another alert for the contact, and the first one would never end there.  So
whatever happens to the rule or the machine meanwhile, the end goes where the beginning went.

A silence or a maintenance window covers alerts while it lasts: a covered alert is
*silenced* instead of firing, and fires when the silence ends.  An acknowledged alert stays acknowledged until
it ends.

**Time** is the time of the stream: the broker's clock at the newest message read.  Operations of users carry
the time of the user's clock, which is recorded but does not advance any alert.

A verdict that is older than the last one about the same object has no effect, so a batch may be applied
twice.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import msgspec

from muster.core import errors, messages
from muster.core.messages import AlertState
from muster.pipeline.alerts import rules
from muster.predicates import ast, types
from muster.predicates.analysis import type_check
from muster.predicates.backends import python
from muster.predicates.syntax import parser

_STRING = types.parse_type("string")
#: The attributes that a silence may use.
SILENCE_MODEL = dict.fromkeys(("rule", "about", "scope", "severity", "group"), _STRING)

REMEMBER_S = 3600.0  # how long a resolved alert is kept, so that a repeated verdict does not reopen it
FORGET_S = 86400.0  # an alert about a group or zone ends after this time without reports
SILENCES_MAX = 10_000
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "severity": tuple(severity.value for severity in messages.Severity),
    "scope": get_args(rules.Scope),
}


class AlertEvent(enum.Enum):
    BEGINS = "begins"
    HELD = "held"
    ENDS = "ends"
    ACKNOWLEDGE = "acknowledge"
    SILENCE = "silence"
    UNSILENCE = "unsilence"


NEXT: Mapping[tuple[AlertState, AlertEvent], AlertState] = {
    (AlertState.RESOLVED, AlertEvent.BEGINS): AlertState.PENDING,
    (AlertState.PENDING, AlertEvent.HELD): AlertState.FIRING,
    (AlertState.PENDING, AlertEvent.ENDS): AlertState.RESOLVED,
    (AlertState.FIRING, AlertEvent.ENDS): AlertState.RESOLVED,
    (AlertState.FIRING, AlertEvent.ACKNOWLEDGE): AlertState.ACKNOWLEDGED,
    (AlertState.FIRING, AlertEvent.SILENCE): AlertState.SILENCED,
    (AlertState.ACKNOWLEDGED, AlertEvent.ENDS): AlertState.RESOLVED,
    (AlertState.SILENCED, AlertEvent.UNSILENCE): AlertState.FIRING,
    (AlertState.SILENCED, AlertEvent.ACKNOWLEDGE): AlertState.ACKNOWLEDGED,
    (AlertState.SILENCED, AlertEvent.ENDS): AlertState.RESOLVED,
}


class RuleVerdict(msgspec.Struct, frozen=True):
    """Whether a rule is true of an object at a time."""

    rule: str
    about: str
    on: bool
    at_ms: int
    value: float | None = None
    group: str = ""


class TrackedAlert(msgspec.Struct):
    rule: str
    about: str
    state: AlertState = AlertState.RESOLVED
    on: bool = False
    began_ms: int = 0  # when it became true
    since_ms: int = 0  # when this state began
    evaluated_ms: int = -1
    value: float | None = None
    group: str = ""
    by: str = ""  # who acknowledged it
    notified: bool = False  # the contacts received the firing alert, so they also receive its end
    # Of the rule when it fired, as is `group`: frozen while `notified`.
    severity: messages.Severity = messages.Severity.WARNING
    contacts: tuple[str, ...] = msgspec.field(default=(), name="receivers")
    labels: messages.Labels | None = None  # None: stored by a version that did not freeze them


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Suppresses notifications of selected alerts. One that starts later is a maintenance window."""

    id: str
    covers: str
    from_ms: messages.TimeMs
    until_ms: messages.TimeMs
    by: str = ""
    reason: str = ""

    def is_on(self, now_ms: int) -> bool:
        return self.from_ms <= now_ms < self.until_ms


class AlertNotification(msgspec.Struct, frozen=True):
    """An alert to be sent to contacts."""

    alert: messages.Alert
    contacts: tuple[str, ...] = msgspec.field(name="receivers")
    transport: str = ""  # webhook or mail, if it is only for this one

    @property
    def id(self) -> str:
        alert = self.alert
        return f"{alert.rule}:{alert.about}:{alert.state.value}:{alert.since_ms}"


class DeliveryResult(msgspec.Struct, frozen=True):
    """The result of a test notification. ``status``: the HTTP status of a webhook, if it replied."""

    transport: str  # webhook or mail
    outcome: str  # sent or failed
    status: int | None = None
    reason: str = ""


class AlertUpdates(msgspec.Struct):
    alerts: list[messages.Alert] = msgspec.field(default_factory=list)
    notifications: list[AlertNotification] = msgspec.field(default_factory=list)


class AlertTrackerState(msgspec.Struct):
    """The tracker's state that survives a restart."""

    version: int = 1
    now_ms: int = 0
    entries: list[TrackedAlert] = msgspec.field(default_factory=list)
    silences: list[Silence] = msgspec.field(default_factory=list)


#: The states by how much they need attention.
_URGENCY = (
    AlertState.FIRING,
    AlertState.PENDING,
    AlertState.ACKNOWLEDGED,
    AlertState.SILENCED,
    AlertState.RESOLVED,
)


def urgency(alert: messages.Alert) -> tuple[int, int, str, str]:
    """Sort key: alerts that need attention first."""
    return _URGENCY.index(alert.state), alert.since_ms, alert.rule, alert.about


def alert_key(alert: messages.Alert | TrackedAlert) -> str:
    """Sort key of pages."""
    return f"{alert.rule} {alert.about}"


class AlertTracker:
    def __init__(
        self,
        known: Iterable[rules.AlertRule],
        memory: AlertTrackerState | None = None,
        *,
        forget_s: float = FORGET_S,
    ) -> None:
        self._rules = {rule.name: rule for rule in known}
        self._forget_ms = int(forget_s * 1000)
        memory = memory or AlertTrackerState()
        self._now_ms = memory.now_ms
        self._entries = {
            (entry.rule, entry.about): entry for entry in memory.entries if self._has_rule(entry)
        }
        # Alerts of rules that are no longer in the file or no longer apply to their objects: they end.
        self._orphans = [
            entry
            for entry in memory.entries
            if not self._has_rule(entry) and entry.state is not AlertState.RESOLVED
        ]
        self._silences = {silence.id: silence for silence in memory.silences}
        self._covers: dict[str, Callable[[Callable[[str], Any]], bool]] = {}

    # Queries

    def alerts(self) -> list[messages.Alert]:
        """All unresolved alerts, those that need attention first."""
        open_ = [entry for entry in self._entries.values() if entry.state is not AlertState.RESOLVED]
        return sorted(map(self._alert, open_), key=urgency)

    def page(self, after: str, limit: int) -> list[messages.Alert]:
        """The first unresolved alerts after the key ``after``, in the order of `alert_key`."""
        open_ = (
            (key, entry)
            for entry in self._entries.values()
            if entry.state is not AlertState.RESOLVED and (key := alert_key(entry)) > after
        )
        return [self._alert(entry) for _, entry in heapq.nsmallest(limit, open_, key=lambda item: item[0])]

    def silences(self) -> list[Silence]:
        return sorted(self._silences.values(), key=lambda silence: silence.until_ms)

    def on(self) -> frozenset[tuple[str, str]]:
        """The pairs of rule and object for which the rule is true."""
        return frozenset(key for key, entry in self._entries.items() if entry.on)

    def state(self) -> AlertTrackerState:
        return AlertTrackerState(
            now_ms=self._now_ms,
            entries=[*self._entries.values(), *self._orphans],
            silences=list(self._silences.values()),
        )

    # Changes

    def apply(self, verdicts: Sequence[RuleVerdict], now_ms: int) -> AlertUpdates:
        """Apply the verdicts of a batch and advance the clock to ``now_ms``."""
        outcome = AlertUpdates()
        for verdict in verdicts:
            if verdict.rule not in self._rules:
                continue
            entry = self._entries.get((verdict.rule, verdict.about))
            if entry is None:
                if not verdict.on:
                    continue
                entry = self._entries[verdict.rule, verdict.about] = TrackedAlert(verdict.rule, verdict.about)
            if verdict.at_ms < entry.evaluated_ms:
                continue
            entry.evaluated_ms = verdict.at_ms
            if not entry.notified:
                entry.group = verdict.group
            if verdict.value is not None:  # a window without measurements keeps the previous value
                entry.value = verdict.value
            if verdict.on != entry.on:
                entry.on = verdict.on
                if verdict.on:
                    entry.began_ms = verdict.at_ms
                self._transition(
                    entry, AlertEvent.BEGINS if verdict.on else AlertEvent.ENDS, verdict.at_ms, outcome
                )
        self._advance_clock(now_ms, outcome)
        return outcome

    def tick(self, now_ms: int) -> AlertUpdates:
        outcome = AlertUpdates()
        self._advance_clock(now_ms, outcome)
        return outcome

    def acknowledge(self, rule: str, about: str, by: str, now_ms: int) -> AlertUpdates:
        entry = self._entries.get((rule, about))
        if entry is None or entry.state is AlertState.RESOLVED:
            raise errors.NotFound(f"there is no open alert of {rule!r} about {about!r}")
        if (entry.state, AlertEvent.ACKNOWLEDGE) not in NEXT:
            raise errors.Conflict(f"the alert of {rule!r} about {about!r} is {entry.state.value}")
        outcome = AlertUpdates()
        entry.by = by
        self._transition(entry, AlertEvent.ACKNOWLEDGE, now_ms, outcome)
        return outcome

    def resolve(self, rule: str, about: str, now_ms: int) -> AlertUpdates:
        """End an alert; it is raised again when its rule becomes true again, or is evaluated and true."""
        entry = self._entries.get((rule, about))
        if entry is None or entry.state is AlertState.RESOLVED:
            raise errors.NotFound(f"there is no open alert of {rule!r} about {about!r}")
        outcome = AlertUpdates()
        entry.on = False
        self._transition(entry, AlertEvent.ENDS, max(now_ms, entry.since_ms), outcome)
        return outcome

    def silence(self, silence: Silence, now_ms: int) -> AlertUpdates:
        _require_valid(silence.covers)
        for name, time_ms in (("begin", silence.from_ms), ("end", silence.until_ms)):
            if not 0 <= time_ms <= messages.TIME_MS_MAX:
                raise errors.InvalidInput(
                    f"the silence would {name} at {time_ms} ms: expected 0 to {messages.TIME_MS_MAX}"
                )
        if silence.until_ms <= max(silence.from_ms, now_ms):
            raise errors.InvalidInput("the silence would end before it begins")
        if len(self._silences) >= SILENCES_MAX:
            raise errors.LimitExceeded(f"there are {SILENCES_MAX} silences already")
        self._silences[silence.id] = silence
        self._covers.pop(silence.id, None)
        return self.tick(self._now_ms)

    def unsilence(self, id: str) -> AlertUpdates:
        if self._silences.pop(id, None) is None:
            raise errors.NotFound(f"there is no silence {id!r}")
        self._covers.pop(id, None)
        return self.tick(self._now_ms)

    # Transitions

    def _advance_clock(self, now_ms: int, outcome: AlertUpdates) -> None:
        self._now_ms = max(self._now_ms, now_ms)
        self._end_orphans(outcome)
        for gone in [silence.id for silence in self._silences.values() if silence.until_ms <= self._now_ms]:
            del self._silences[gone]
            self._covers.pop(gone, None)
        for key, entry in list(self._entries.items()):
            rule = self._rules[entry.rule]
            if entry.state is AlertState.RESOLVED:
                if self._now_ms - entry.evaluated_ms > REMEMBER_S * 1000:
                    del self._entries[key]
            elif rule.scope in ("group", "zone") and self._now_ms - entry.evaluated_ms > self._forget_ms:
                entry.on = False
                self._transition(entry, AlertEvent.ENDS, self._now_ms, outcome)
            elif entry.state is AlertState.PENDING:
                held_ms = entry.began_ms + int(rule.for_s * 1000)
                if self._now_ms >= held_ms:
                    self._transition(entry, AlertEvent.HELD, held_ms, outcome)
            elif entry.state is AlertState.FIRING and self._is_silenced(entry):
                self._transition(entry, AlertEvent.SILENCE, self._now_ms, outcome)
            elif entry.state is AlertState.SILENCED and not self._is_silenced(entry):
                self._transition(entry, AlertEvent.UNSILENCE, self._now_ms, outcome)

    def _has_rule(self, entry: TrackedAlert) -> bool:
        rule = self._rules.get(entry.rule)
        scope, separator, name = entry.about.partition(":")
        return rule is not None and (
            not separator or (scope == rule.scope and (not rule.only or name in rule.only))
        )

    def _end_orphans(self, outcome: AlertUpdates) -> None:
        orphans, self._orphans = self._orphans, []
        for entry in orphans:
            entry.state, entry.since_ms = AlertState.RESOLVED, max(self._now_ms, entry.since_ms)
            alert = self._alert(entry)
            outcome.alerts.append(alert)
            if entry.notified and entry.contacts:
                outcome.notifications.append(AlertNotification(alert, entry.contacts))

    def _transition(self, entry: TrackedAlert, event: AlertEvent, at_ms: int, outcome: AlertUpdates) -> None:
        entry.state = NEXT[entry.state, event]
        entry.since_ms = at_ms
        rule = self._rules[entry.rule]
        if entry.state is AlertState.PENDING and rule.for_s == 0:
            self._transition(entry, AlertEvent.HELD, at_ms, outcome)
            return
        if entry.state is AlertState.FIRING and self._is_silenced(entry):
            entry.state = NEXT[entry.state, AlertEvent.SILENCE]
        if entry.state is AlertState.FIRING and not entry.notified:
            entry.notified, entry.severity, entry.contacts = True, rule.severity, rule.notify
            entry.labels = rule.labels
        alert = self._alert(entry)
        outcome.alerts.append(alert)
        notify = entry.state is AlertState.FIRING or (entry.state is AlertState.RESOLVED and entry.notified)
        if notify and entry.contacts:
            outcome.notifications.append(AlertNotification(alert, entry.contacts))
        if entry.state is AlertState.RESOLVED:
            entry.notified, entry.by = False, ""

    def _is_silenced(self, entry: TrackedAlert) -> bool:
        rule = self._rules[entry.rule]
        facts = {
            "rule": entry.rule,
            "about": entry.about,
            "scope": rule.scope,
            "severity": self._severity(entry).value,
            "group": entry.group,
        }
        for silence in self._silences.values():
            if silence.is_on(self._now_ms):
                if silence.id not in self._covers:
                    self._covers[silence.id] = python.compile(parser.parse(silence.covers))
                if self._covers[silence.id](facts.get):
                    return True
        return False

    def _severity(self, entry: TrackedAlert) -> messages.Severity:
        rule = self._rules.get(entry.rule)
        return entry.severity if rule is None or entry.notified else rule.severity

    def _alert(self, entry: TrackedAlert) -> messages.Alert:
        rule = self._rules.get(entry.rule)
        labels = entry.labels if entry.notified else None
        if labels is None:
            labels = {} if rule is None else rule.labels
        return messages.Alert(
            rule=entry.rule,
            about=entry.about,
            severity=self._severity(entry),
            state=entry.state,
            since_ms=entry.since_ms,
            at_ms=max(entry.evaluated_ms, entry.since_ms),
            value=entry.value,
            reason=rule.format_summary(entry.about, entry.value)
            if rule and self._has_rule(entry)
            else "the rule was removed, or no longer applies to it",
            labels={**labels, **({"group": entry.group} if entry.group else {})},
            acknowledged_by=entry.by,
            condition="" if rule is None else rule.when,
        )


def _require_valid(covers: str) -> None:
    """A silence that can never match an alert is rejected, because its author relies on it."""
    condition = parser.parse(covers)
    if any(name.key == "level" for name in ast.names(condition)):
        options = " or ".join(f"{name} ({', '.join(values)})" for name, values in _CHOICES.items())
        raise errors.InvalidInput("an alert has no attribute level", hint=f"did you mean {options}?")
    type_check.require(condition, SILENCE_MODEL, covers)
    for node in ast.walk(condition):
        match node:
            case ast.Comparison(left=ast.Name() as name, right=ast.Literal(value=str() as word)):
                words: Sequence[str] = (word,)
            case ast.In(name=name, words=words):
                pass
            case _:
                continue
        for word in words:
            if word not in _CHOICES.get(name.key, (word,)):
                other = next(
                    (f"did you mean {key}?" for key, known in _CHOICES.items() if word in known), None
                )
                raise errors.InvalidInput(
                    f"{name.key} is one of {', '.join(_CHOICES[name.key])}, not {word!r:.40}", hint=other
                )
