"""Alert rules, in YAML (docs/reference/pipeline.md).

`MODELS` lists the attributes that a predicate may use in each scope.  Metrics that are not standard are
``own.NAME`` of a machine, and ``own.NAME_mean``, ``_min`` and ``_max`` of the other scopes.  So are the
metrics of services: ``own.shop_queue`` is the metric ``queue`` of the service ``shop``, and ``own.shop_up``
is 1 or 0.  A file with an invalid rule is rejected as a whole; the error names the rule and, for a predicate,
the position.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from muster.core import errors, messages, subjects, units
from muster.core.formats import yaml
from muster.core.reports import columns
from muster.core.settings import sections
from muster.predicates import ast, types
from muster.predicates.analysis import type_check
from muster.predicates.syntax import parser

doc = sections.field_doc

Scope = Literal["node", "group", "zone", "system"]

_STRING, _INT, _FLOAT, _BOOL = (types.parse_type(name) for name in ("string", "int", "float", "bool"))

Z = "_z"  # suffix of scores: the distance of a value from its own history

OWN = "own"  # prefix of metrics that are not standard
_OWN_STATISTICS = ("mean", "min", "max")


class _Open(dict[str, types.AttributeType]):
    """A model that also accepts the fleet's own metrics, whatever their names."""

    def __init__(self, fixed: Mapping[str, types.AttributeType], endings: tuple[str, ...] = ()) -> None:
        super().__init__(fixed)
        self._endings = tuple(f"_{ending}" for ending in endings)

    def __missing__(self, name: str) -> types.AttributeType:
        if name in self:
            return _FLOAT
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name) or not isinstance(name, str):
            return super().__contains__(name)
        return name.startswith(f"{OWN}.") and (not self._endings or name.endswith(self._endings))

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, _FLOAT if name in self else default)


_NODE = {
    "machine": _STRING,
    "group": _STRING,
    "zone": _STRING,
    "state": _STRING,
    "period_s": _FLOAT,
    "age_s": _FLOAT,  # since the last report of the machine
    **dict.fromkeys(columns.STANDARD_METRICS, _FLOAT),
    **{f"{metric}{Z}": _FLOAT for metric in columns.STANDARD_METRICS},
}
#: Attributes that are known of a silent machine; a rule that uses only these is evaluated in every batch.
ALWAYS_KNOWN = frozenset({"machine", "group", "zone", "period_s", "age_s"})

_STATISTICS = ("mean", "min", "max", "p50", "p95", "p99", "z")
_MANY: dict[str, types.AttributeType] = {
    "name": _STRING,
    "machines": _INT,
    "reports": _INT,
    "known": _INT,
    "stale": _INT,
    "stale_share": _FLOAT,
    "dropped": _INT,
    "partial": _BOOL,
    **{f"{metric}_{statistic}": _FLOAT for metric in columns.STANDARD_METRICS for statistic in _STATISTICS},
}
#: ``cpu_percent_z`` is the distance of a machine, or of the mean of a scope, from its own history, in robust
#: standard deviations.
MODELS: Mapping[str, Mapping[str, types.AttributeType]] = {
    "node": _Open(_NODE),
    **dict.fromkeys(("group", "zone", "system"), _Open(_MANY, _OWN_STATISTICS)),
}

RULES_MAX = 200
FILE_BYTES_MAX = 1 << 20

Seconds = Annotated[float, msgspec.Meta(ge=0, le=7 * 86400)]


class AlertRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A condition about machines, groups, zones or the system, and the alert that it raises."""

    name: Annotated[str, doc("Name of the rule and of its alerts.")]
    scope: Annotated[Scope, doc("What the condition is about.")]
    when: Annotated[str, doc("Predicate over the attributes of the scope: the alert begins.")]
    until: Annotated[str, doc("Predicate: the alert ends (default: when `when` is false).")] = ""
    for_s: Annotated[Seconds, doc("How long the condition must hold, as 30s or a number of seconds.")] = 0.0
    severity: Annotated[messages.Severity, doc("Severity of its alerts.")] = messages.Severity.WARNING
    summary: Annotated[
        str, msgspec.Meta(max_length=1000), doc("Text of its alerts, with {rule}, {about} and {value}.")
    ] = "{rule} holds of {about}"
    labels: Annotated[messages.Labels, doc("Names and values for notifications.")] = {}
    notify: Annotated[tuple[str, ...], doc("Contacts (below) that are notified.")] = ()
    only: Annotated[
        tuple[str, ...],
        doc("Only these machines, groups or zones, also if they never reported."),
    ] = ()

    def __post_init__(self) -> None:
        subjects.token(self.name)
        for text in filter(None, (self.when, self.until)):
            type_check.require(_parsed(text), MODELS[self.scope], text)
        if self.only and self.scope == "system":
            raise errors.InvalidInput("`only` lists groups, zones or machines, not the system")
        if len(self.format_summary("x" * 300, 1e300)) > 4096:
            raise errors.InvalidInput("summary: over 4096 characters when it is filled in")

    @property
    def condition(self) -> ast.Condition:
        return _parsed(self.when)

    @property
    def release(self) -> ast.Condition:
        """The condition that ends an alert of this rule."""
        if self.until:
            return _parsed(self.until)
        return ast.Not(self.condition)

    @property
    def names(self) -> frozenset[str]:
        return _named(self.when) | (_named(self.until) if self.until else frozenset())

    @property
    def measured(self) -> str | None:
        """The number that an alert of this rule shows: the first numeric attribute of its condition."""
        numbers = [
            node.key
            for node in ast.walk(self.condition)
            if isinstance(node, ast.Name)
            and (known := MODELS[self.scope].get(node.key))
            and known.kind.is_number
        ]
        return numbers[0] if numbers else None

    def format_summary(self, about: str, value: float | None) -> str:
        try:
            return self.summary.format(
                rule=self.name, about=about, value=float("nan") if value is None else value
            )
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise errors.InvalidInput(
                f"summary: {error!r}; it may hold {{rule}}, {{about}} and {{value}}"
            ) from error


@functools.lru_cache(4 * RULES_MAX)
def _parsed(text: str) -> ast.Condition:
    return parser.parse(text, scopes=(OWN,))


@functools.lru_cache(4 * RULES_MAX)
def _named(text: str) -> frozenset[str]:
    return frozenset(name.key for name in ast.names(_parsed(text)))


def parse(text: str, source: str = "rules") -> tuple[AlertRule, ...]:
    """`errors.InvalidInput` names the invalid rule and the reason."""
    if len(text) > FILE_BYTES_MAX:
        raise errors.LimitExceeded(f"{source}: over {FILE_BYTES_MAX} characters of rules")
    document = yaml.read(text, source)
    listed = document.get("rules", []) if isinstance(document, dict) else document or []
    if not isinstance(listed, list):
        raise errors.InvalidInput(f"{source}: expected a list of rules")
    if len(listed) > RULES_MAX:
        raise errors.LimitExceeded(f"{source}: {len(listed)} rules are over {RULES_MAX}")
    rules: dict[str, AlertRule] = {}
    for number, entry in enumerate(listed, 1):
        rule = _rule(entry, f"{source}, rule {number}")
        if rule.name in rules:
            raise errors.InvalidInput(f"{source}: two rules have the name {rule.name!r}")
        rules[rule.name] = rule
    return tuple(rules.values())


def load(path: Path) -> tuple[AlertRule, ...]:
    try:
        return parse(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise errors.InvalidInput(f"cannot read the rules {str(path)!r}: {error}") from error


def _rule(entry: Any, where: str) -> AlertRule:
    if not isinstance(entry, dict):
        raise errors.InvalidInput(f"{where}: expected a mapping with name, scope and when")
    name = entry.get("name")
    where = f"{where} ({name})" if isinstance(name, str) else where
    settings = {("for_s" if key == "for" else key): value for key, value in entry.items()}
    try:
        if isinstance(settings.get("for_s"), str):
            settings["for_s"] = units.parse_duration_s(settings["for_s"])
        return msgspec.convert(settings, AlertRule)
    except msgspec.ValidationError as error:
        # msgspec wraps the errors of __post_init__; the cause has the better message.
        cause = error.__cause__
        if isinstance(cause, errors.ParseError):
            raise errors.InvalidInput(
                f"{where}: {cause.message}\n{cause.pointer()}", hint=cause.hint
            ) from error
        raise errors.InvalidInput(f"{where}: {cause or error}") from error
    except errors.ParseError as error:
        raise errors.InvalidInput(f"{where}: {error.message}\n{error.pointer()}", hint=error.hint) from error
    except errors.MusterError as error:
        raise errors.InvalidInput(f"{where}: {error.message}", hint=error.hint) from error
