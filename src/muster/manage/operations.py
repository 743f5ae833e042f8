"""Operations of management that commands and REST offer as they are: see `muster.bus.rpc.operations`."""

from __future__ import annotations

import functools

from muster.bus.rpc import operations

_operation = functools.partial(operations.ServiceOperation, "muster.manage.client:ManageClient", "manage")

RESOURCES = _operation(
    "enumerate",
    "List resources and their states.",
    columns=(
        *("name", "type?", "group?", "agent?", "desired?", "state", "since_ms", "restarts"),
        *("reason", "drift", "manager?"),
    ),
)
SUMMARY = _operation("summary", "Number of resources by state.")
DESCRIBE = _operation("describe", "Show the details of a resource.")
DRAIN = _operation("drain", "Drain a resource.", action="drain", target="{name}")
UNDRAIN = _operation("undrain", "Return a drained resource to service.", action="undrain", target="{name}")
AGENTS = _operation(
    "agents",
    "List agents.",
    columns=("name", "state", "zone", "resources", "orphans", "cordoned", "labels?"),
)
MANAGERS = _operation(
    "managers",
    "List managers and their resources.",
    columns=("name", "resources", "expires_in_s", "leaving"),
)
ROLLOUTS = _operation(
    "rollouts",
    "List rollouts and their results.",
    columns=(
        *("id", "state", "operation", "revision?", "groups?", "wave?", "waves?", "counts", "unreachable?"),
        *("reverts?", "reverted_by?", "reason"),
    ),
)
STEPS = _operation(
    "rollout_steps", "List the steps of a rollout.", columns=("name", "state", "reason", "result?")
)
PAUSE = _operation("pause", "Pause a rollout.", action="pause", target="{id}")
RESUME = _operation("resume", "Continue a paused rollout.", action="resume", target="{id}")
ABORT = _operation("abort", "End a rollout; what reverts itself is reverted.", action="abort", target="{id}")
UNDO = _operation("undo", "Return a group to an earlier revision.", action="undo", target="{group}")
REVISIONS = _operation(
    "revisions",
    "List what each update has changed in the resources of a group.",
    columns=("revision", "at_ms", "by", "rollout", "state", "name", "act", "changes"),
)
JOBS = _operation(
    "jobs",
    "List jobs: when they run, and how their last run ended.",
    columns=(
        *("name", "cron", "time_zone?", "state", "next_ms?", "active", "waiting?", "skipped?", "missed?"),
        *("last_state?", "last_ms?", "reason"),
    ),
)
JOB_RUNS = _operation(
    "job_runs",
    "List the runs of a job that have ended, with exit code and output.",
    columns=(
        "resource",
        "job?",
        "state",
        "began_ms?",
        "ended_ms",
        "exit_code?",
        "agent?",
        "reason",
        "output",
    ),
)
#: The columns of tables of the activity log.
ACTIVITY = ("at_ms", "who", "what", "target", "outcome", "why")
RUN_JOB = _operation("run_job", "Start a run of a job.", action="job-run", target="{name}")
REBALANCE_PLAN = _operation(
    "rebalance_plan",
    "List resources that fit better on other agents.",
    columns=("name", "type?", "group?", "agent", "to", "reason"),
)
REBALANCE = _operation(
    "rebalance", "Move resources that fit better on other agents.", action="rebalance", target="resources"
)
SECRETS = _operation(
    "secrets",
    "List the names of secrets and the resources that use them.",
    columns=("name", "by", "at_ms", "used_by"),
)
DELETE_SECRET = _operation(
    "delete_secret",
    "Delete a secret that no resource refers to.",
    action="secret-delete",
    target="{name}",
)
