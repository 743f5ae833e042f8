"""The types of what the registry returns to users: rows of lists, descriptions and results.

REST schemas, columns of the command line and tables of the dashboard derive from these types. Unlike messages
on the wire they encode every field, also one at its default, so that readers need no list of defaults.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from muster.core import messages
from muster.manage import protocol
from muster.predicates import ast, types
from muster.predicates.analysis import type_check
from muster.predicates.syntax import parser

Counts = dict[str, int]
ENROLMENT_KEPT_S = 7 * 86400.0  # how long an expired enrolment token still gets an error with the reason


class ResourceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A resource in a list. ``applied``: whether the last change of the desired state was applied.
    ``stable``: whether its agent has reported it as up for some time since then and since the last operation.
    """

    name: str
    type: str
    group: str = "default"
    agent: str
    desired: str  # a desired state, or `absent` while it is being deleted
    state: str
    reason: str = ""
    since_ms: int = 0  # the time of the last change of state; 0: unknown
    drift: str = ""
    restarts: int = 0
    manager: str | None = None
    epoch: int = 0
    generation: int
    applied: bool = False
    stable: bool = False


class ResourcePage(msgspec.Struct, frozen=True):
    """A page of a list; ``next`` is the key of the next page, None at the end."""

    items: list[ResourceRow]
    next: str | None


class ResourceDescription(ResourceRow, frozen=True, kw_only=True):
    """All details of a resource. ``waits_for``: dependencies that are not up yet."""

    spec: protocol.ResourceSpec
    applied_by: str = ""
    waits_for: list[str] = []
    status: protocol.ResourceStatus | None = None


class FleetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of resources: all, not in the desired state, down as desired, and by state,
    group, type and manager."""

    resources: int = 0
    agents: int = 0
    not_applied: int = 0
    down_as_desired: int = 0
    states: Counts = {}
    groups: Counts = {}
    types: Counts = {}
    managers: Counts = {}


class AgentRow(msgspec.Struct, frozen=True, kw_only=True):
    """An agent. ``cordoned``: it is drained and accepts no resources. ``state``, by those of its resources
    that have not ended: unknown if they are unknown, because it does not respond, or if something was moved
    from it, or removed without it, and it has not reported since; down if they are down
    because it is silent while others of its zone are not; otherwise up. Without such resources: up if it has
    announced itself within the last 75 s, otherwise down; unknown while the registry is active for a shorter
    time. Forgotten: it has not reported yet that nothing is left on its machine. ``orphans``: number of
    resources on the machine that do not belong there.
    """

    name: str
    state: str = ""
    resources: int = 0
    orphans: int = 0
    zone: str = "default"
    labels: dict[str, str] = {}
    facts: dict[str, Any] = {}
    types: list[str] = []
    machine: str = ""
    cordoned: bool = False


class OrphanRow(msgspec.Struct, frozen=True, kw_only=True):
    """A resource on an agent's machine that does not belong there. ``is_deleted``: the agent is to
    delete it; otherwise it has to be applied, or applied and deleted."""

    name: str
    agent: str
    state: str
    pid: int | None = None
    reason: str = ""
    epoch: int = 0
    generation: int = 0
    is_deleted: bool = True


class ForgottenAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that was forgotten. ``is_empty``: it has reported that it hosts nothing."""

    name: str
    is_empty: bool = False


class ManagerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A manager. ``expires_in_s``: the remaining time of its lease."""

    name: str
    resources: int = 0
    expires_in_s: float
    leaving: bool = False


class PlanStep(msgspec.Struct, frozen=True, kw_only=True):
    """What an apply would do with a resource. ``changes``: by field, the current and the new value."""

    wave: int
    act: str  # create, change, keep or delete
    name: str
    type: str
    changes: dict[str, tuple[Any, Any]] = {}


class ApplyResult(msgspec.Struct, frozen=True, kw_only=True):
    """``counts`` of the acts, the number of changed resources, and the first names; ``notes`` for people.
    ``rollout``: the id of the one that carries out the changes, if there is one."""

    counts: Counts
    changed_count: int
    changed: list[str] = []
    deleting: list[str] = []
    notes: list[str] = []
    rollout: str = ""


class DeleteResult(msgspec.Struct, frozen=True, kw_only=True):
    deleting: list[str] = []


class DrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """The number of resources whose desired state changed, and the first names."""

    count: int
    changed: list[str] = []


class ForgetResult(msgspec.Struct, frozen=True, kw_only=True):
    """The forgotten agent, the number of its resources, and their first names."""

    forgotten: str
    count: int
    resources: list[str] = []


class ExecutionRow(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an operation on a resource. ``truncated``: the result or the reason is incomplete."""

    resource: str
    outcome: str
    result: Any = None
    reason: str = ""
    code: str = ""
    truncated: bool = False


class LogRow(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the log of a resource, as a reader with ``cursor`` gets it; ``reason``: why there is none."""

    resource: str
    text: str = ""
    cursor: str = ""
    end: str = ""
    is_last: bool = True
    dropped: int = 0
    reason: str = ""
    code: str = ""

    @classmethod
    def of(cls, resource: str, answer: protocol.OperationResult) -> LogRow:
        if answer.outcome is not messages.DecisionOutcome.DONE:
            return cls(resource=resource, reason=answer.reason or answer.outcome.value, code=answer.code)
        try:
            page = msgspec.convert(answer.result, protocol.LogPage)
        except msgspec.ValidationError as error:  # adapters are third-party code
            return cls(resource=resource, reason=f"the log cannot be read: {error}", code="bad-result")
        return cls(resource=resource, **msgspec.structs.asdict(page))


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    resource: str
    line: str


class MergedLog(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of several logs. ``notes``: why some are missing."""

    lines: list[LogLine]
    notes: list[str] = []


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operation on many resources, in batches. ``errors_max``: more failures stop the rollout.

    A resource that is not in its desired state within ``healthy_s`` after its operation is a failure; 0: this
    is not checked.
    """

    operation: str
    arguments: dict[str, Any] = {}
    batch: str = "1"  # a count, or a percentage such as 10%
    pause_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0
    errors_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    timeout_s: protocol.OperationTimeout = protocol.OPERATION_TIMEOUT_S
    healthy_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 60.0


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout. ``counts``: number of steps in each state; ``unreachable``: the first names. ``revision``:
    of an update; ``reverts`` and ``reverted_by`` are ids of rollouts."""

    id: str
    at_ms: int
    state: str
    reason: str = ""
    by: str
    operation: str
    counts: Counts = {}
    unreachable: list[str] = []
    revision: int = 0
    wave: int = 0
    waves: int = 0
    groups: list[str] = []
    reverts: str = ""
    reverted_by: str = ""


class RolloutStepRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a rollout: one resource. ``result``: of an operation; of a failed update, the end of its
    log."""

    name: str
    state: str
    reason: str = ""
    result: Any = None
    wave: int = 0


class RevisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a revision of a group changed in one of its resources. ``changes``: by field, before and after."""

    revision: int
    at_ms: int
    by: str
    rollout: str
    state: str  # of the rollout
    name: str
    act: str  # create, change or delete
    changes: dict[str, tuple[Any, Any]] = {}


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job; ``cron`` is empty for one that runs once. ``waiting``: runs that are due and have not begun;
    ``skipped``: those that were not started because another one had not ended; ``missed``: those that could
    not start in time."""

    name: str
    cron: str = ""
    time_zone: str = ""
    state: str
    reason: str = ""
    next_ms: int | None = None
    active: int = 0
    waiting: int = 0
    skipped: int = 0
    missed: int = 0
    last_state: str = ""
    last_ms: int | None = None  # when the last run ended


class JobRunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has ended: completed, failed or deleted. ``output``: its last lines."""

    job: str
    resource: str
    generation: int
    agent: str
    state: str
    reason: str = ""
    began_ms: int = 0
    ended_ms: int = 0
    exit_code: int | None = None
    output: str = ""


class JobStart(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was started: the resource, and its generation."""

    job: str
    resource: str
    generation: int


class MoveRow(msgspec.Struct, frozen=True, kw_only=True):
    """A resource that fits better on another agent, ``to``."""

    name: str
    type: str
    group: str
    agent: str
    to: str
    reason: str


class SecretRow(msgspec.Struct, frozen=True, kw_only=True):
    """A secret without its value, and the first resources that use it."""

    name: str
    by: str
    at_ms: int
    used_by: list[str] = []
    used_by_count: int = 0


class SecretDeleted(msgspec.Struct, frozen=True, kw_only=True):
    deleted: str


class Enrolment(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an enrolment token."""

    name: str
    by: str
    expires_at_s: float
    approved: bool
    spent: bool = False
    admitted: bool = False  # the admission was completed
    machine: str = ""
    public_key: str = ""  # of the machine that sent the first request
    roles: tuple[str, ...] = ()  # of a machine of the domain; empty: it only has an agent


class EnrolmentRow(msgspec.Struct, frozen=True, kw_only=True):
    """``token``: its identity. ``version``: of this record."""

    token: str
    enrolment: Enrolment
    version: int


#: The states that a desired state asks for.
_AS_DESIRED = {"up": ("up", "completed"), "down": ("down",), "drained": ("down",)}


def is_in(row: ResourceRow, state: str | None) -> bool:
    """Whether it is in this state, or without one in its desired state."""
    return row.state in ((state,) if state else _AS_DESIRED.get(row.desired, ())) and row.applied


def is_settled(row: ResourceRow) -> bool:
    """Whether it is in its desired state and was seen to stay there for some time."""
    return is_in(row, None) and (row.stable or row.state != "up")


def is_given_up(row: ResourceRow) -> bool:
    """Whether it does not reach its desired state without a change of that, or a start by a user."""
    return row.state == "failed" and row.desired == "up"


def given_up_hint(name: str) -> str:
    return f"`muster logs {name}` shows its output; `muster exec {name} start` tries again"


def condition(row: ResourceRow | None) -> str:
    return f"{row.name} is {row.state}: {row.reason}" if row else ""


ACTIVE_ROLLOUT = ("running", "paused", "stopping")


def rollout_share(row: RolloutRow) -> float:
    over = sum(count for state, count in row.counts.items() if state not in ("pending", "running"))
    return over / (sum(row.counts.values()) or 1)


def rollout_progress(row: RolloutRow) -> str:
    """Such as ``wave 2 of 5: 3 of 10 done``."""
    done = f"{row.counts.get('done', 0):,} of {sum(row.counts.values()):,} done"
    return f"wave {row.wave} of {row.waves}: {done}" if row.waves else done


CHANGE_FIELDS = dict.fromkeys(("resource", "state", "was", "reason", "manager"), types.STRING)


def check_change_condition(where: str) -> bool:
    """Whether the condition names only fields of a change. Raises `errors.ParseError` if it compares them so
    that it is always false."""
    condition = parser.parse(where)
    if any(name.key not in CHANGE_FIELDS for name in ast.names(condition)):
        return False
    type_check.require(condition, CHANGE_FIELDS, where)
    return True


def event_fields(event: protocol.ResourceStateChange | protocol.ResourceEvent) -> dict[str, Any]:
    """The fields that a condition on events can name."""
    if isinstance(event, protocol.ResourceEvent):
        return {**event.details, "resource": event.resource, "what": event.what}
    return {
        "resource": event.resource,
        "state": event.state.value,
        "was": event.was.value if event.was else None,
        "reason": event.reason,
        "manager": event.manager,
    }
