"""When alerts fired, from the changes of their states, and their conditions in words. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import msgspec

from muster.core import errors, messages, units
from muster.pipeline.alerts import rules
from muster.predicates import ast
from muster.predicates.syntax import parser

STATISTICS = {
    "mean": "mean",
    "min": "least",
    "max": "greatest",
    "p50": "median",
    "p95": "95 %",
    "p99": "99 %",
}
ENDED = messages.AlertState.RESOLVED
OPEN = (messages.AlertState.FIRING, messages.AlertState.SILENCED, messages.AlertState.ACKNOWLEDGED)
MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


class AlertSpan(msgspec.Struct, frozen=True, kw_only=True):
    """An alert from its first firing to its end, with the changes of its state: time and state.

    ``to_ms`` null: it has not ended.
    """

    rule: str
    about: str
    severity: str
    condition: str = ""
    from_ms: int
    to_ms: int | None = None
    changes: list[tuple[int, str]] = []


def spans(changes: Iterable[messages.Alert]) -> list[AlertSpan]:
    """The alerts that fired, the newest first. ``changes``: oldest first."""
    begun: dict[tuple[str, str], AlertSpan] = {}
    ended: list[AlertSpan] = []
    for alert in changes:
        key = (alert.rule, alert.about)
        span = begun.get(key)
        if alert.state in OPEN:
            step = (alert.since_ms, alert.state.value)
            if span is None:
                begun[key] = AlertSpan(
                    rule=alert.rule,
                    about=alert.about,
                    severity=alert.severity.value,
                    condition=alert.condition,
                    from_ms=alert.since_ms,
                    changes=[step],
                )
            elif span.changes[-1] != step:
                span.changes.append(step)
        elif span is not None and alert.state is ENDED:
            ended.append(msgspec.structs.replace(begun.pop(key), to_ms=max(alert.since_ms, span.from_ms)))
    return sorted([*begun.values(), *ended], key=lambda span: -span.from_ms)


def in_words(condition: str, value: float | None) -> str:
    """``cpu_percent_mean > 20`` as "CPU mean 33 % > 20 %"; another form as it is written."""
    compared = _compared(condition)
    if compared is None:
        return condition
    name, operator, limit = compared
    measured = "unknown" if value is None else figure(name, value)
    return f"{metric_words(name)} {measured} {operator} {figure(name, limit)}"


def limit_of(condition: str, metric: str) -> float | None:
    """The limit of a condition about this metric; None if it is about something else."""
    compared = _compared(condition)
    return compared[2] if compared is not None and metric_of(condition) == metric else None


def metric_of(condition: str) -> str | None:
    """The metric that a simple condition is about."""
    compared = _compared(condition)
    return None if compared is None else _base(compared[0])[0]


@functools.lru_cache(1000)
def _compared(condition: str) -> tuple[str, str, float] | None:
    """The attribute, the operator and the limit of a simple comparison."""
    try:
        parsed = parser.parse(condition, scopes=(rules.OWN,)) if condition else None
    except errors.MusterError:
        return None
    for node in parsed.operands if isinstance(parsed, ast.And) else (parsed,):
        if isinstance(node, ast.Comparison):
            left, right, operator = node.left, node.right, str(node.operator)
            if isinstance(left, ast.Literal):
                left, right, operator = right, left, MIRRORED.get(operator, operator)
            if isinstance(left, ast.Name) and isinstance(right, ast.Literal):
                limit = right.value
                if isinstance(limit, int | float) and not isinstance(limit, bool):
                    return left.key, operator, float(limit)
    return None


def _base(name: str) -> tuple[str, str]:
    """The metric of an attribute and its statistic: ``own.infected_mean`` is the mean of ``infected``."""
    metric, _, statistic = name.removeprefix(f"{rules.OWN}.").rpartition("_")
    return (metric, statistic) if metric and statistic in STATISTICS else (name.removeprefix("own."), "")


def metric_words(name: str) -> str:
    metric, statistic = _base(name)
    for ending in ("_percent", "_bytes_s", "_bytes", "_s"):
        metric = metric.removesuffix(ending)
    words = metric.replace("_", " ").replace("cpu", "CPU")
    return " ".join(filter(None, (words[:1].upper() + words[1:], STATISTICS.get(statistic, ""))))


def figure(name: str, value: float) -> str:
    metric, statistic = _base(name)
    if metric.endswith("_percent"):
        return f"{value:.3g} %"
    if metric.endswith("_bytes_s"):
        return f"{units.rounded_size(value)}/s"
    if metric.endswith("_bytes"):
        return units.rounded_size(value)
    if metric.endswith("_s"):
        return units.rounded_duration(value)
    if (name.startswith(f"{rules.OWN}.") and statistic == "mean" and 0 <= value <= 1) or name.endswith(
        "_share"
    ):
        return f"{100 * value:.3g} %"
    return f"{value:,.4g}"
