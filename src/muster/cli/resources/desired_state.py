"""Commands for the desired state: ``apply``, ``plan``, ``diff``, ``delete``, ``drain``, ``rebalance``,
``rollout``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from muster.cli import command, connection, leaf, live_names, registry_calls, tables
from muster.core import units
from muster.manage import operations

if TYPE_CHECKING:
    from muster.manage import client, protocol, rows

T = TypeVar("T")

_PLAN = ("wave", "act", "name", "type")


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster apply -f fleet.yaml", ""),
        ("muster apply -f fleet.yaml --wait 60s", "fail if not all resources reach their desired state"),
    ],
)
@registry_calls.file_option
@command.duration(
    "--wait",
    None,
    "Wait up to this time until all waves are done and all resources stay in their desired state.",
)
@connection.options
@command.pass_invocation
def apply(
    invocation: command.Invocation, path: Path, wait_s: float | None, to: connection.ConnectionOptions
) -> None:
    """Apply a manifest and keep the resources in the declared state."""
    text = registry_calls.read_text(path)
    with invocation.printer.progress("applying") as say:
        tell = _wave_notes(invocation, say)
        done = registry_calls.call_registry(
            invocation, to, lambda fleet: _noted(invocation, fleet.apply(text, wait_s=wait_s, progress=tell))
        )
    changed, all_ = done.changed_count, sum(done.counts.values())
    invocation.printer.done(done, f"applied: {changed:,} of {all_:,} resources changed")
    for note in done.notes:
        invocation.printer.note(f"note: {note}")


def _wave_notes(
    invocation: command.Invocation, say: Callable[[str, float | None], None]
) -> Callable[[str, float], None]:
    """Report progress, and each wave on a line of its own."""
    shown = ""

    def tell(step: str, share: float) -> None:
        nonlocal shown
        say(step, share)
        wave = step.partition(":")[0]
        if step.startswith("wave ") and wave != shown:
            shown = wave
            invocation.printer.note(step)

    return tell


async def _noted(invocation: command.Invocation, work: Awaitable[T]) -> T:
    """The result; if it fails, first what it adds to its error: the last lines of logs."""
    try:
        return await work
    except Exception as error:
        for note in getattr(error, "__notes__", ()):
            if not note.startswith("hint: "):  # which follows the error
                invocation.printer.note(note)
        raise


@click.command(
    cls=command.MusterCommand, examples=[("muster plan -f fleet.yaml", "the steps of a wave run in parallel")]
)
@registry_calls.file_option
@connection.options
@command.pass_invocation
def plan(invocation: command.Invocation, path: Path, to: connection.ConnectionOptions) -> None:
    """Show the steps of an apply without executing them."""
    text = registry_calls.read_text(path)
    steps = registry_calls.call_registry(invocation, to, lambda fleet: fleet.plan(text))
    invocation.printer.rows(steps, _PLAN, of="step")


@click.command(cls=command.MusterCommand, examples=[("muster diff -f fleet.yaml", "")])
@registry_calls.file_option
@connection.options
@command.pass_invocation
def diff(invocation: command.Invocation, path: Path, to: connection.ConnectionOptions) -> None:
    """Show field by field what an apply would change."""
    text = registry_calls.read_text(path)
    steps = registry_calls.call_registry(invocation, to, lambda fleet: fleet.plan(text))
    changes = [
        {"name": step.name, "field": field, "is": before, "would_be": after}
        for step in steps
        for field, (before, after) in step.changes.items()
    ]
    changes += [
        {"name": step.name, "field": "", "is": "absent", "would_be": "present"}
        for step in steps
        if step.act == "create"
    ]
    invocation.printer.rows(changes, ("name", "field", "is", "would_be"), of="change", empty="no difference")


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster delete -f fleet.yaml", ""),
        ("muster delete web-1 web-2 --wait 30s", ""),
        ("muster delete --where \"group = 'web'\"", "muster targets shows what a predicate selects"),
    ],
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=live_names.RESOURCES)
@click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="Delete the resources of this manifest; '-' reads standard input.",
)
@click.option("--where", default="", metavar="PREDICATE", help="Delete what this predicate selects.")
@command.duration("--wait", None, "Wait up to this time until the resources are deleted.")
@click.option(
    "--force",
    is_flag=True,
    help="For lost machines: delete without contacting the agents. A machine that returns deletes them then.",
)
@connection.options
@command.pass_invocation
def delete(
    invocation: command.Invocation,
    names: tuple[str, ...],
    path: Path | None,
    where: str,
    wait_s: float | None,
    force: bool,
    to: connection.ConnectionOptions,
) -> None:
    """Stop resources and delete them, dependent ones first."""
    if bool(names) + bool(path) + bool(where) != 1:
        raise click.UsageError("give either names, -f FILE or --where PREDICATE")
    text = registry_calls.read_text(path) if path else ""

    async def work(fleet: client.ManageClient) -> rows.DeleteResult:
        if path is not None:
            done = await fleet.delete_manifest(text, force=force)
        else:
            done = await fleet.delete(*(names or await fleet.names(where=where)), force=force)
        if wait_s is not None:
            await fleet.wait_gone(*done.deleting, timeout_s=wait_s)
        return done

    with invocation.printer.waiting("deleting"):
        done = registry_calls.call_registry(invocation, to, work)
    did = "removed" if force else "deleting" if wait_s is None else "deleted"
    invocation.printer.done(done, f"{did} {units.format_count(len(done.deleting), 'resource')}")
    if where and not done.deleting:
        invocation.printer.note(command.empty_result("the predicate selects no resource", (), where))


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster drain host-a", "stop all resources of an agent and assign no new ones"),
        ("muster drain web-1", ""),
        ("muster drain host-a --undo", ""),
    ],
)
@click.argument("name", shell_complete=live_names.RESOURCES_AND_AGENTS)
@click.option("--undo", is_flag=True, help="Return it to service.")
@click.option(
    "--kind", type=click.Choice(["resource", "agent"]), help="Which of them, if both have this name."
)
@connection.options
@command.pass_invocation
def drain(
    invocation: command.Invocation,
    name: str,
    undo: bool,
    kind: protocol.DrainKind | None,
    to: connection.ConnectionOptions,
) -> None:
    """Drain a resource, or all resources of an agent."""
    done = registry_calls.call_registry(
        invocation, to, lambda fleet: fleet.undrain(name, kind) if undo else fleet.drain(name, kind)
    )
    invocation.printer.done(
        done, f"{units.format_count(done.count, 'resource')} {'returned to service' if undo else 'draining'}"
    )


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster rebalance", "show what would be moved, and why"),
        ("muster rebalance --where \"group = 'web'\" --apply --wait 10m", "move it, as an update does"),
    ],
)
@click.option("--where", default="", metavar="PREDICATE", help="Only resources that this predicate selects.")
@click.option("--apply", "applies", is_flag=True, help="Move them, instead of showing the plan.")
@command.duration("--wait", None, "Wait up to this time until all are moved.")
@connection.options
@command.pass_invocation
def rebalance(
    invocation: command.Invocation,
    where: str,
    applies: bool,
    wait_s: float | None,
    to: connection.ConnectionOptions,
) -> None:
    """Show which resources fit better on other agents, and move them.

    Only resources that may be rescheduled move. The update policy of their group says how many at a time.
    """
    if not applies:
        planned = registry_calls.call_registry(invocation, to, lambda fleet: fleet.rebalance_plan(where))
        columns = operations.REBALANCE_PLAN.columns
        invocation.printer.rows(planned, columns, of="resource", empty="nothing has to be moved")
        return
    _follow(invocation, to, "rebalancing", wait_s, lambda fleet: fleet.rebalance(where))


@click.group(
    cls=command.MusterGroup, examples=[("muster rollout start restart --where \"group = 'web'\"", "")]
)
def rollout() -> None:
    """Follow and control gradual changes: updates, and operations on many resources."""


@rollout.command(
    examples=[
        ("muster rollout start restart --where \"group = 'web'\" --batch 10% --pause 5s", ""),
        ("muster rollout start web-1 web-2 restart --max-errors 1 --wait 5m", ""),
    ],
)
@registry_calls.operation_argument(metavar="[RESOURCE]... OPERATION")
@click.option("--where", default="", metavar="PREDICATE", help="Select resources with this predicate.")
@click.option(
    "--batch",
    metavar="N|N%",
    default="1",
    show_default=True,
    help="Batch size: a number, or a percentage (10%).",
)
@command.duration("--pause", None, "Pause between batches.")
@click.option(
    "--max-errors",
    type=command.CountParam(0),
    default=0,
    show_default=True,
    help="Stop the rollout after more errors than this.",
)
@registry_calls.arguments_option
@command.duration(
    "--healthy",
    "60s",
    "Time for each resource to reach its desired state after the operation; 0s: not checked.",
    may_be_zero=True,
)
@command.duration("--wait", None, "Wait up to this time for the end of the rollout (default: no limit).")
@click.option("--no-wait", is_flag=True, help="Return when the rollout has started.")
@connection.options
@command.pass_invocation
def start(
    invocation: command.Invocation,
    /,
    words: tuple[str, ...],
    where: str,
    batch: str,
    pause_s: float | None,
    max_errors: int,
    arguments: tuple[str, ...],
    healthy_s: float,
    wait_s: float | None,
    no_wait: bool,
    to: connection.ConnectionOptions,
) -> None:
    """Run an operation on resources in batches."""
    from muster.manage import rows

    names, operation = registry_calls.split_words(words, where)
    plan_ = rows.RolloutPlan(
        operation=operation,
        arguments=registry_calls.key_values(arguments),
        batch=batch,
        pause_s=pause_s or 0.0,
        errors_max=max_errors,
        healthy_s=healthy_s,
    )

    async def work(fleet: client.ManageClient) -> rows.RolloutRow:
        begun = await fleet.rollout(plan_, *names, where=where)
        return begun if no_wait else await fleet.wait_rollout(begun.id, timeout_s=wait_s, progress=say)

    with invocation.printer.progress(f"rolling out {operation}") as say:
        result = registry_calls.call_registry(invocation, to, work)
    invocation.printer.rows([result], operations.ROLLOUTS.columns, of="rollout")
    if result.state in ("stopped", "superseded"):
        raise click.exceptions.Exit(1)


leaf.add(
    rollout,
    operations.ROLLOUTS,
    name="list",
    of="rollout",
    empty="no rollouts",
    examples=[("muster rollout list", "")],
)


@rollout.command(
    examples=[
        ("muster rollout status", "of the last one"),
        ("muster rollout status 1f2e3d4c", ""),
        ("muster rollout status web --wait 10m", "of the last update of the group web, when it has ended"),
    ]
)
@click.argument("id", required=False, metavar="[ID|GROUP]", shell_complete=live_names.ROLLOUTS)
@command.duration("--wait", None, "Wait up to this time for its end; fail if it is stopped.")
@connection.options
@command.pass_invocation
def status(
    invocation: command.Invocation, id: str | None, wait_s: float | None, to: connection.ConnectionOptions
) -> None:
    """Show the state of each resource of a rollout, wave by wave."""

    async def work(fleet: client.ManageClient) -> tuple[list[rows.RolloutRow], list[rows.RolloutStepRow]]:
        matching = (await fleet.rollouts(id))[-1:]
        if matching and wait_s is not None:
            matching = [await fleet.wait_rollout(matching[0].id, timeout_s=wait_s, progress=tell)]
        steps = await fleet.rollout_steps(matching[0].id) if matching else []
        return matching, sorted(steps, key=lambda step: (step.wave, step.name))

    with invocation.printer.progress("waiting") as say:
        tell = _wave_notes(invocation, say)
        matching, steps = registry_calls.call_registry(invocation, to, work)
    if invocation.printer.for_people:
        invocation.printer.rows(matching, operations.ROLLOUTS.columns, of="rollout", empty="no rollouts")
    shown = ("wave?", "name", "state", "reason", "result")
    invocation.printer.rows(steps, shown, of="step", empty="no steps")
    if wait_s is not None and any(row.state != "done" for row in matching):
        raise click.exceptions.Exit(1)


@rollout.command(examples=[("muster rollout history web", "revisions of the group web, with differences")])
@click.argument("group")
@connection.options
@command.pass_invocation
def history(invocation: command.Invocation, group: str, to: connection.ConnectionOptions) -> None:
    """List the revisions of a group, and what each has changed."""
    revisions = registry_calls.call_registry(invocation, to, lambda fleet: fleet.revisions(group))
    if not invocation.printer.for_people:
        invocation.printer.rows(revisions, (), of="revision")
        return
    lines = [
        {
            "revision": row.revision,
            "at": tables.local(row.at_ms / 1000),
            "by": row.by,
            "rollout": row.state,
            "name": row.name,
            "act": row.act,
            "field": field,
            "was": before,
            "became": after,
        }
        for row in revisions
        for field, (before, after) in (row.changes or {"": ("", "")}).items()
    ]
    shown = ("revision", "at", "by", "rollout", "name", "act", "field", "was", "became")
    invocation.printer.rows(lines, shown, of="revision", empty=f"no revisions of {group}")


@rollout.command(
    examples=[
        ("muster rollout undo web", "the last revision of the group web that was not reverted"),
        ("muster rollout undo web --to 3", "what the group was after revision 3"),
    ]
)
@click.argument("group")
@click.option("--to", "revision", type=command.CountParam(1), help="The revision to return to.")
@command.duration("--wait", None, "Wait up to this time until it is undone.")
@connection.options
@command.pass_invocation
def undo(
    invocation: command.Invocation,
    group: str,
    revision: int | None,
    wait_s: float | None,
    to: connection.ConnectionOptions,
) -> None:
    """Return the resources of a group to an earlier revision, wave by wave."""

    _follow(invocation, to, f"undoing {group}", wait_s, lambda fleet: fleet.undo(group, to=revision))


def _follow(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    what: str,
    wait_s: float | None,
    begin: Callable[[client.ManageClient], Awaitable[rows.RolloutRow]],
) -> None:
    """Begin an update and show it, when it has ended if there is time to wait."""

    async def work(fleet: client.ManageClient) -> rows.RolloutRow:
        begun = await begin(fleet)
        if wait_s is None:
            return begun
        return await fleet.wait_rollout(begun.id, timeout_s=wait_s, progress=tell)

    with invocation.printer.progress(what) as say:
        tell = _wave_notes(invocation, say)
        result = registry_calls.call_registry(invocation, to, work)
    invocation.printer.rows([result], operations.ROLLOUTS.columns, of="rollout")
    if result.state in ("stopped", "superseded"):
        raise click.exceptions.Exit(1)


def _control(invocation: command.Invocation, to: connection.ConnectionOptions, id: str, verb: str) -> None:
    done = registry_calls.call_registry(invocation, to, lambda fleet: getattr(fleet, verb)(id))
    invocation.printer.done(done, f"rollout {id} is {done.state}")


@rollout.command(examples=[("muster rollout pause 1f2e3d4c", "")])
@click.argument("id", metavar="ID|GROUP", shell_complete=live_names.ROLLOUTS)
@connection.options
@command.pass_invocation
def pause(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Pause a rollout after the current wave."""
    _control(invocation, to, id, "pause")


@rollout.command(examples=[("muster rollout resume 1f2e3d4c", "")])
@click.argument("id", metavar="ID|GROUP", shell_complete=live_names.ROLLOUTS)
@connection.options
@command.pass_invocation
def resume(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Resume a paused or stopped rollout."""
    _control(invocation, to, id, "resume")


@rollout.command(examples=[("muster rollout abort 1f2e3d4c", "")])
@click.argument("id", metavar="ID|GROUP", shell_complete=live_names.ROLLOUTS)
@connection.options
@command.pass_invocation
def abort(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """End a rollout. An update that reverts itself when it fails is reverted."""
    _control(invocation, to, id, "abort")
