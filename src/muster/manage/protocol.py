"""The wire protocol of management: subjects and messages.

    muster.manage.from.<user>.request.<verb>         a request to the active registry that changes something
    muster.manage.from.<user>.read.<verb>            a request to the active registry that only reads
    muster.manage.from.<manager>.renew               a manager renews and requests its assignments
    muster.manage.from.<manager>.checkpoint          runtime states of its resources, to be stored
    muster.manage.to.<manager>.poke                  assignments changed: renew now
    muster.manage.to.<manager>.execute               operations requested by users
    muster.manage.from.<agent>.hello                 an agent announces its facts, labels and adapters
    muster.manage.from.<agent>.request.secret        an agent requests a secret of a resource it starts
    muster.manage.from.<manager>.vouch.<agent>[.<what>]  either, forwarded by a manager it is connected to
    muster.manage.to.<agent>.claim                   a manager takes over resources
    muster.manage.to.<agent>.operation.<resource>    a manager requests an operation
    muster.manage.from.<agent>.beat.<manager>        heartbeats of an agent's resources, many in a message
    muster.manage.from.<agent>.event.<manager>       an event of a resource
    muster.manage.all.state.<resource>               a change of a resource's health, published by its manager
    muster.manage.all.event.<resource>               an event of a resource, forwarded by its manager
    muster.manage.log.decision.<what>                the audit, in the stream ``decisions``
    muster.manage.log.registry.page and .body        the records of the registry, in the stream ``registry``

A manager is identified by the epoch of its assignment, which is part of each operation; an adapter refuses a
lower one.  The agent records the id and outcome of each operation, so a repeated request is not executed
again.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import msgspec

from muster.bus.direct import frames
from muster.core import health, messages, subjects
from muster.core.settings import sections

doc = sections.field_doc

PART = "manage"
LEASE = f"{PART}.registry"
STREAM = "registry"
REGISTRY_LOG = subjects.log_subject(PART, "registry")
PAGE, PAGE_BYTES = 1_000, 600_000  # assignments in one reply: below the size limit of a message
CONFIG_BYTES_MAX = 256 << 10  # of one resource
SPEC_BYTES_MAX = 512 << 10  # for one resource, with labels and dependencies
DEPENDENCIES_MAX = 1_000  # of one resource
AGENT_BYTES_MAX = 64 << 10  # for facts and labels of one agent
OPERATION_TIMEOUT_S = 30.0
NOT_MANAGED = "not-managed"  # the resource of an order belongs to another manager, or to none
NOT_CHECKPOINTED = "not-checkpointed"  # of a result: the registry has an older state of the resource
TOPOLOGY = "topology"  # the label of brokers of a topology
CHANGED = "changed"  # the event for a changed state
SECRET = "secret"  # the verb of an agent that requests a secret
RENEW, HELLO = "renew", "hello"
LOGS = "logs"  # the verb that reads logs: it changes nothing, and needs the right to execute operations
JOB_RUNS = "job-runs"  # contains the ends of logs
#: The verbs of the process that issues and redeems enrolment tokens.
ENROLMENT_READS, ENROLMENT_SET = ("enrolments", "enrolment"), "enrolment-set"
SENSOR = "sensor"  # the fact of an agent that names the identity of the sensor of its machine
HELLO_S = 30.0  # interval at which agents announce themselves
INVENTORY_PAGE = 2_000  # resources in one announcement
AFTER_S_MIN = 5  # of a `ReschedulePolicy`
METRICS_MAX = 100  # of a machine, in one announcement

#: An operation of resources with a log. It changes nothing: agents do not record it, nor wait for others.
LOG_PAGE = "log-page"
LOG_BYTES_MAX, LOG_LINES_MAX = 256 << 10, 100_000  # of one page

#: A command that a user runs inside a resource, with a right of its own: it is begun, and then input and
#: output are exchanged, in requests that may be repeated.
SHELL, SHELL_EXCHANGE, SHELL_END = "shell", "shell-exchange", "shell-end"
SHELL_WAIT_S = 1.0  # how long an exchange waits for output
SHELL_BYTES_MAX = 64 << 10  # of the input or output in one exchange

DrainKind = Literal["resource", "agent"]
Values = dict[str, Any]
OperationTimeout = Annotated[float, msgspec.Meta(gt=0, le=3600)]  # in seconds
HeartbeatPeriod = Annotated[float, msgspec.Meta(gt=0, le=86400)]  # in seconds


class Verb(enum.Enum):
    GET = "get"
    PUT = "put"
    CREATE = "create"
    DELETE = "delete"
    RENAME = "rename"
    ENUMERATE = "enumerate"
    EXECUTE = "execute"
    SHELL = "shell"  # begins a command of a user, or exchanges its input and output


class DesiredState(enum.Enum):
    UP = "up"
    DOWN = "down"
    DRAINED = "drained"  # finish current work, then stop


class ObservedState(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter's observation of its resource. ``digest`` is that of the applied configuration.

    ``ran``: the generation of the last run (0: never ran), None if the adapter does not record it. ``boot``
    (it grows with each start of the agent) and ``sequence`` order the observations of one resource: the later
    one counts, whichever arrives last.
    """

    exists: bool
    state: health.HealthState = health.HealthState.DOWN
    reason: str = ""
    digest: str = ""
    properties: Values = {}
    ran: int | None = None
    boot: int = 0
    sequence: int = 0


class Operation(messages.WireMessage, frozen=True, kw_only=True, tag="operation/1", omit_defaults=True):
    id: messages.Name
    verb: Verb
    resource: messages.Name
    epoch: messages.Count
    manager: messages.Text = ""
    type: messages.Text = ""
    config: Values = msgspec.field(default_factory=dict)
    start: bool = True  # for a creation: whether to start the resource
    operation: messages.Text = ""  # for an execution
    arguments: Values = msgspec.field(default_factory=dict)
    timeout_s: OperationTimeout = OPERATION_TIMEOUT_S
    generation: messages.Count = 0  # of the desired state that it applies; 0: none
    #: For a creation: of its `ReschedulePolicy`. The agent stops it if it cannot renew; 0: it never moves.
    stop_after_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0
    hooks: Hooks | None = None  # for a creation or change


class OperationResult(messages.WireMessage, frozen=True, kw_only=True, tag="answer/1", omit_defaults=True):
    """The outcome of an operation. ``epoch``: the highest that the adapter has accepted.

    ``truncated``: the result or the reason is incomplete (see `operation_results`).
    """

    id: messages.Name
    outcome: messages.DecisionOutcome
    result: Any = None
    code: messages.Text = ""
    reason: messages.Text = ""
    observed: ObservedState | None = None
    epoch: messages.Count = 0
    truncated: bool = False


class LogQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of `LOG_PAGE`. Without a cursor: from the last ``lines`` of what was written within
    ``since_s``, or from the beginning. ``until``: a cursor at which to end."""

    cursor: Annotated[str, msgspec.Meta(max_length=64)] = ""
    until: Annotated[str, msgspec.Meta(max_length=64)] = ""
    lines: Annotated[int, msgspec.Meta(ge=0, le=LOG_LINES_MAX)] | None = None
    since_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    bytes_max: Annotated[int, msgspec.Meta(ge=64, le=LOG_BYTES_MAX)] = 64 << 10


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a resource's log. ``cursor``: where the next part begins; ``end``: the present end.
    ``is_last``: nothing follows yet. ``dropped``: number of bytes that were removed before they were read.
    """

    text: str
    cursor: str = ""
    end: str = ""
    is_last: bool = True
    dropped: int = 0


TerminalSize = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class ShellCommand(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag="begin"
):
    """A command to run inside a resource. ``terminal``: the type of the user's terminal, of the size
    ``rows`` and ``columns``; empty: none, its output and its errors are separate."""

    command: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=64 << 10, pattern=r"^[^\x00]*$(?!\n)")], ...],
        msgspec.Meta(min_length=1, max_length=1_000),
    ]
    terminal: Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9+.-]{0,63})?$(?!\n)")] = ""
    rows: TerminalSize = 24
    columns: TerminalSize = 80


class ShellExchange(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag="exchange"
):
    """Input for a command, and the next part of its output. ``received``: number of chunks of its output that
    the user has; with ``wait_s``, the next ones are wanted. ``sent``: number of bytes of the input before
    ``data``. So each request may be repeated.
    ``is_end``: of the input; ``closes``: the user ends it.
    """

    received: messages.Count = 0
    sent: messages.Count = 0
    data: Annotated[bytes, msgspec.Meta(max_length=SHELL_BYTES_MAX)] = b""
    is_end: bool = False
    rows: TerminalSize | None = None
    columns: TerminalSize | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=SHELL_WAIT_S)] = 0.0
    closes: bool = False


class ShellOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``chunks``: the stream (1: output, 2: errors) and the bytes, from the chunk number ``first`` on.
    ``taken``: number of bytes of the input that were taken. ``exit_code``: of a command that has ended and
    whose output is complete (a signal is negative)."""

    chunks: tuple[tuple[int, bytes], ...] = ()
    first: int = 0
    taken: int = 0
    exit_code: int | None = None


class ClaimRequest(messages.WireMessage, frozen=True, kw_only=True, tag="claim/1", omit_defaults=True):
    """Without resources: the agent hosts something that the manager does not know, and announces itself."""

    manager: messages.Name
    resources: dict[str, int]  # name: epoch
    direct: frames.PeerAddress | None = None  # where the manager accepts direct connections


class ClaimResult(messages.WireMessage, frozen=True, kw_only=True, tag="claimed/1", omit_defaults=True):
    """``observed``: states of the claimed resources; ``superseded``: epochs of those that a later manager
    owns.
    """

    observed: dict[str, ObservedState] = msgspec.field(default_factory=dict)
    superseded: dict[str, int] = msgspec.field(default_factory=dict)
    period_s: HeartbeatPeriod = 5.0
    zone: messages.Name = "default"


class ResourceHeartbeat(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The heartbeat of one resource, in a batch."""

    name: str
    state: health.HealthState
    epoch: int
    digest: str = ""
    reason: str = ""


class HeartbeatBatch(messages.WireMessage, frozen=True, kw_only=True, tag="beats/1", omit_defaults=True):
    """Heartbeats of the resources that one agent hosts for one manager."""

    sequence: messages.Count
    at_ms: messages.TimeMs
    period_s: HeartbeatPeriod
    zone: messages.Name = "default"
    beats: tuple[ResourceHeartbeat, ...] = ()


class ResourceEvent(
    messages.WireMessage, frozen=True, kw_only=True, tag="resource-event/1", omit_defaults=True
):
    resource: messages.Name
    what: messages.Name
    observed: ObservedState | None = None
    epoch: messages.Count = 0
    at_ms: messages.TimeMs = 0
    details: messages.Labels = msgspec.field(default_factory=dict)


class ReportedResource(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A resource in the inventory of an agent. ``generation``: of its last run; ``pid``: 0 if it has none.
    ``stop_after_s``: as the agent enforces it."""

    name: messages.Name
    epoch: messages.Count
    state: health.HealthState = health.HealthState.DOWN
    generation: messages.Count = 0
    pid: messages.Count = 0
    stop_after_s: float = 0.0


class AgentHello(messages.WireMessage, frozen=True, kw_only=True, tag="agent-hello/1", omit_defaults=True):
    """``boot`` grows with each start; ``machine`` is constant and differs on a reinstalled machine.
    ``has_deadlines``: its resources are stopped when it cannot renew, as their `ReschedulePolicy` says.

    ``metrics``: of the machine, now; for predicates, and not stored.

    ``hosted``: a page of the resources that exist on the machine, in the order of their names: those after
    ``after`` and up to ``until``; empty means from the first and to the last. None: not reported.
    """

    boot: messages.Count
    machine: messages.Text = ""
    zone: messages.Name = "default"
    labels: messages.Labels = msgspec.field(default_factory=dict)
    facts: Values = msgspec.field(default_factory=dict)
    types: tuple[str, ...] = ()
    hosted: tuple[ReportedResource, ...] | None = None
    after: messages.Text = ""
    until: messages.Text = ""
    has_deadlines: bool = False
    metrics: Annotated[dict[messages.Name, float], msgspec.Meta(max_length=METRICS_MAX)] = msgspec.field(
        default_factory=dict
    )


class HelloResult(msgspec.Struct, frozen=True, kw_only=True):
    """``orphans``: reported resources that do not belong on this agent. It deletes them, unless it has
    accepted a higher epoch than the one given here. ``is_renewed``: otherwise the agent has to report all
    that it hosts, because something was moved from it. ``stop_after_s``: what it has to enforce instead.
    ``floor``: operations of lower epochs create nothing any more, because it may run elsewhere.
    """

    orphans: dict[str, int] = {}
    is_renewed: bool = True
    stop_after_s: dict[str, float] = {}
    floor: int = 0


class ResourceSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The desired configuration of a resource: a manifest entry, checked and complete."""

    name: str
    type: str
    agent: str
    config: Values = {}
    group: str = "default"
    labels: dict[str, str] = {}
    depends_on: tuple[str, ...] = ()
    desired: DesiredState = DesiredState.UP
    restart: RestartPolicy = msgspec.field(default_factory=lambda: RestartPolicy())
    digest: str = ""
    update: UpdatePolicy | None = None
    placement: Placement | None = None
    reschedule: ReschedulePolicy | None = None
    hooks: Hooks | None = None
    job: JobPolicy | None = None
    schedule: JobSchedule | None = None
    where: str = ""  # of its entry, if it may move
    template: Values = {}  # config and labels before `{zone}` and `{agent}` are replaced, if it may move
    #: The name of its entry, of which it is the instance ``index``, or the periodic job of which it is a run;
    #: empty: its own.
    entry: str = ""
    index: int = 0

    @property
    def is_run(self) -> bool:
        """Whether it is a run of a periodic job."""
        return self.job is not None and bool(self.entry) and not self.index


class RestartPolicy(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """How often and how soon a failed resource is restarted."""

    policy: Annotated[Literal["always", "on-failure", "never"], doc("on-failure: not after exit code 0.")] = (
        "always"
    )
    attempts: Annotated[
        int, doc("Restarts within `window_s` before the manager gives up.", ge=1, le=1000)
    ] = 5
    window_s: Annotated[float, doc("Period in which attempts are counted.", gt=0, le=86400)] = 300.0
    delay_s: Annotated[float, doc("Delay before a restart; doubles with each attempt.", ge=0, le=3600)] = 0.2
    delay_s_max: Annotated[float, doc("Maximum of this delay.", ge=0, le=3600)] = 30.0


class UpdatePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the resources of a group change to a new version: wave by wave, as long as they stay healthy."""

    max_parallel: Annotated[
        int, doc("Resources of the group that may be changed, or not work, at a time.", ge=1)
    ] = 1
    canary: Annotated[int, doc("Size of the first wave; 0: as the others.", ge=0)] = 0
    min_healthy_time_s: Annotated[
        float, doc("Time for which a changed resource has to be up before the next wave.", ge=0, le=86400)
    ] = 10.0
    healthy_deadline_s: Annotated[
        float, doc("Time within which that has to be reached; otherwise the update fails.", gt=0, le=86400)
    ] = 300.0
    progress_deadline_s: Annotated[
        float, doc("Time without any progress after which the update fails.", gt=0, le=86400)
    ] = 600.0
    auto_revert: Annotated[
        bool, doc("Whether an update that fails returns to the previous specification.")
    ] = True


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """On which of the agents that match `where` a resource is placed."""

    spread: Annotated[
        Literal["zone", "agent", "none"],
        doc(
            "zone: instances of an entry are divided evenly among the zones, and within a zone among its "
            "agents; agent: among all agents; none: the agent with the fewest resources."
        ),
    ] = "zone"
    affinity: Annotated[
        str | None, doc("Predicate over resources: only on an agent that hosts one that matches.")
    ] = None
    anti_affinity: Annotated[
        str | None, doc("Predicate over resources: not on an agent that hosts one that matches.")
    ] = None
    cpu: Annotated[
        float, doc("Cores that it requests of those that its machine reports (the fact `cpus`).", ge=0)
    ] = 0.0
    memory_mb: Annotated[
        int, doc("Memory that it requests of what its machine reports (the fact `memory_mb`).", ge=0)
    ] = 0


class ReschedulePolicy(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """When a resource of a lost machine is started on another one. It is stopped before, even if its agent is
    frozen: there are never two."""

    after_s: Annotated[
        float,
        doc(
            "Time without contact after which its machine is lost. An agent that could not renew for 0.75 of "
            "it stops the resource, and kills it at 0.9 of it: also during an outage of all registries or "
            "brokers that lasts longer.",
            ge=AFTER_S_MIN,
            le=86400,
        ),
    ] = 20.0
    attempts: Annotated[
        int, doc("Moves within `window_s`; then it waits for its machine.", ge=1, le=1000)
    ] = 5
    window_s: Annotated[float, doc("Period in which moves are counted.", gt=0, le=86400)] = 3600.0


class HookCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A command that the agent executes, with the environment of the resource."""

    command: Annotated[
        tuple[str, ...], doc("The program and its arguments; no shell.", min_length=1, max_length=1000)
    ]
    timeout_s: Annotated[float, doc("Time after which it is killed and has failed.", gt=0, le=3600)] = 30.0


class Hooks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Commands at certain points of a resource's life."""

    post_start: Annotated[
        HookCommand | None,
        doc("After each start. If it fails, the start has failed: the resource is stopped."),
    ] = None
    pre_stop: Annotated[
        HookCommand | None,
        doc(
            "Before each stop, also before it is deleted. If it fails, the resource is stopped all the same."
        ),
    ] = None


class JobPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A resource that runs to its end. How often a failed run is repeated is determined by `restart`."""

    deadline_s: Annotated[
        float, doc("Time after which a run is stopped and has failed; 0: none.", ge=0, le=31536000)
    ] = 0.0
    keep: Annotated[int, doc("Ended runs in its history, with the end of their output.", ge=1, le=100)] = 10


class JobSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a periodic job runs. Each run is a resource of its own, NAME-TIME, until it has ended."""

    cron: Annotated[
        str,
        doc(
            "Minute, hour, day of month, month, day of week: `30 2 * * mon-fri`; or @hourly, @daily, "
            "@weekly, @monthly, @yearly.",
            min_length=1,
            max_length=200,
        ),
    ]
    time_zone: Annotated[str, doc("Its time zone, such as Europe/Berlin.", min_length=1, max_length=64)] = (
        "UTC"
    )
    concurrency: Annotated[
        Literal["allow", "forbid", "replace"],
        doc(
            "If the previous run has not ended; forbid: skip this one; replace: stop the previous one first."
        ),
    ] = "forbid"
    missed: Annotated[
        Literal["skip", "last", "all"],
        doc(
            "What becomes of runs that could not start in time; last: the last of them is started late, "
            "unless another one is due by then; all: one after the other, at most 100."
        ),
    ] = "last"
    within_s: Annotated[
        float, doc("How late a run may start without being a missed one.", ge=1, le=86400)
    ] = 60.0


#: Of resources without a policy of their own.
AT_ONCE = UpdatePolicy(max_parallel=1 << 30, min_healthy_time_s=0.0, auto_revert=False)


class Assignment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A resource assigned to a manager."""

    spec: ResourceSpec
    epoch: int
    generation: int
    deleting: bool = False
    formerly: str = ""  # the previous name, from which it has to be renamed
    waits_for: tuple[str, ...] = ()  # dependencies that are not up yet (or dependants that are not gone yet)
    status: ResourceStatus | None = None  # the last checkpoint, of any manager


#: The reason of a resource that is down because its agent is.
AGENT_SILENT = "its agent is silent while others of its zone are not"


class ResourceStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The runtime state of a resource, as its manager checkpoints it."""

    state: health.HealthState = health.HealthState.STARTING
    reason: str = ""
    since_ms: int = 0
    generation: int = 0  # the last applied generation
    drift: str = ""
    restarts: int = 0
    failures_ms: tuple[int, ...] = ()  # times of failures within the restart window
    desired_generation: int = 0  # the generation that was in force at the checkpoint
    ran: int = 0  # the last generation that is known to have run
    began_ms: int = 0  # when its manager last started it
    given_up: bool = False  # no further attempts for the current desired state
    stable: bool = False  # it was seen to stay up since its last start or operation
    gone: bool = False
    fault: str = ""  # why the last step failed, if the state does not show it
    properties: Values = {}
    superseded_by: int = 0  # the higher epoch that the agent accepted; then the rest of the status is invalid


class RenewRequest(messages.WireMessage, frozen=True, kw_only=True, tag="renew/1", omit_defaults=True):
    """``revision``: up to which the manager has its assignments, as counted by ``term`` and ``session``."""

    boot: messages.Count
    term: messages.Count = 0
    session: messages.Count = 0
    revision: messages.Count = 0
    broker: messages.Text = ""
    connection: messages.Count = 0
    leaving: bool = False


class RenewResult(messages.WireMessage, frozen=True, kw_only=True, tag="granted/1", omit_defaults=True):
    term: messages.Count
    session: messages.Count = 0
    revision: messages.Count
    ttl_s: float
    anew: bool = False  # discard previous assignments: this and the next pages are complete
    more: bool = False
    assigned: tuple[Assignment, ...] = ()
    released: tuple[str, ...] = ()


class CheckpointBatch(messages.WireMessage, frozen=True, kw_only=True, tag="checkpoints/1"):
    items: dict[str, tuple[int, ResourceStatus]]  # resource: epoch and status


class OperationOrder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    resource: str
    operation: str
    arguments: Values = {}
    timeout_s: OperationTimeout = OPERATION_TIMEOUT_S
    is_shell: bool = False  # `operation` is the id of the command


class OrderBatch(messages.WireMessage, frozen=True, kw_only=True, tag="orders/1"):
    orders: tuple[OperationOrder, ...]
    by: str = ""


class OrderResults(messages.WireMessage, frozen=True, kw_only=True, tag="results/1"):
    results: tuple[OperationResult, ...]


class ResourceStateChange(
    messages.WireMessage, frozen=True, kw_only=True, tag="resource-state/1", omit_defaults=True
):
    """Published when the health of a resource changed."""

    resource: messages.Name
    state: health.HealthState
    reason: messages.Text = ""
    since_ms: messages.TimeMs = 0
    was: health.HealthState | None = None
    manager: messages.Text = ""
    epoch: messages.Count = 0


def request(user: str, verb: str) -> str:
    return subjects.from_identity(PART, user, "request", verb)


def read(user: str, verb: str) -> str:
    return subjects.from_identity(PART, user, "read", verb)


RENEWALS = subjects.from_identity(PART, "*", RENEW)
STATES = subjects.to_all(PART, "state", "*")
EVENTS = subjects.to_all(PART, "event", "*")


def renew(manager: str) -> str:
    return subjects.from_identity(PART, manager, RENEW)


def checkpoint(manager: str) -> str:
    return subjects.from_identity(PART, manager, "checkpoint")


def to_manager(manager: str, kind: str) -> str:
    return subjects.to_identity(PART, manager, kind)


def hello(agent: str) -> str:
    return subjects.from_identity(PART, agent, HELLO)


def vouch_subject(manager: str, agent: str, *what: str) -> str:
    return subjects.from_identity(PART, manager, "vouch", agent, *what)


def claim(agent: str) -> str:
    return subjects.to_identity(PART, agent, "claim")


def operation(agent: str, resource: str) -> str:
    return subjects.to_identity(PART, agent, "operation", resource)


def operations_of(agent: str) -> str:
    return subjects.to_identity(PART, agent, "operation", "*")


def heartbeat(agent: str, manager: str) -> str:
    return subjects.from_identity(PART, agent, "beat", manager)


def heartbeats_to(manager: str) -> str:
    return subjects.from_identity(PART, "*", "beat", manager)


def event(agent: str, manager: str) -> str:
    return subjects.from_identity(PART, agent, "event", manager)


def events_to(manager: str) -> str:
    return subjects.from_identity(PART, "*", "event", manager)


def state(resource: str) -> str:
    return subjects.to_all(PART, "state", resource)


def resource_event_subject(resource: str) -> str:
    return subjects.to_all(PART, "event", resource)
