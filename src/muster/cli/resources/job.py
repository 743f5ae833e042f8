"""``muster job``: jobs, their runs, and how these ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from muster.cli import command, connection, leaf, live_names, registry_calls
from muster.manage import operations

if TYPE_CHECKING:
    from muster.manage import client, rows


@click.group(
    cls=command.MusterGroup,
    examples=[("muster job list", ""), ("muster job run backup --wait 10m", "start a run now")],
)
def job() -> None:
    """List and run jobs, and show how their runs ended.

    A job is a resource whose manifest says that it runs to its end.
    """


leaf.add(
    job,
    operations.JOBS,
    name="list",
    of="job",
    empty="no jobs",
    examples=[("muster job list", "with next runs")],
)


@job.command(
    examples=[
        ("muster job history backup", "with the last line of the output"),
        ("muster job history", "of all jobs"),
        ("muster job history backup -o json", "with all that is kept of the output"),
    ]
)
@click.argument("name", required=False, default="", shell_complete=live_names.JOBS)
@connection.options
@command.pass_invocation
def history(invocation: command.Invocation, name: str, to: connection.ConnectionOptions) -> None:
    """List the runs of a job that have ended, with exit code and output."""
    import msgspec

    runs = registry_calls.call_registry(invocation, to, lambda fleet: fleet.job_runs(name))
    if invocation.printer.for_people:
        runs = [msgspec.structs.replace(row, output=row.output.rstrip().rpartition("\n")[2]) for row in runs]
    invocation.printer.rows(runs, operations.JOB_RUNS.columns, of="run", empty="no run has ended")


@job.command(
    examples=[
        ("muster job run backup", ""),
        ("muster job run backup --wait 10m", "print its output; fails if the run fails"),
    ]
)
@click.argument("name", shell_complete=live_names.JOBS)
@command.duration("--wait", None, "Wait up to this time for the end of the run.")
@connection.options
@command.pass_invocation
def run(
    invocation: command.Invocation, name: str, wait_s: float | None, to: connection.ConnectionOptions
) -> None:
    """Start a run of a job now, beside its schedule."""

    async def work(fleet: client.ManageClient) -> tuple[rows.JobStart, rows.JobRunRow | None]:
        begun = await fleet.run_job(name)
        return begun, None if wait_s is None else await fleet.wait_run(begun, timeout_s=wait_s)

    with invocation.printer.waiting(f"running {name}"):
        begun, ended = registry_calls.call_registry(invocation, to, work)
    if ended is None:
        invocation.printer.done(begun, f"started {begun.resource}")
        return
    for line in ended.output.splitlines():
        invocation.printer.note(f"{ended.resource}: {line}")
    invocation.printer.done(ended, f"{ended.resource} {ended.state}: {ended.reason}")
    if ended.state != "completed":
        raise click.exceptions.Exit(1)
