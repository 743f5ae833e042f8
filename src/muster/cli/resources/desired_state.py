"""Commands for the desired state: ``apply``, ``plan``, ``diff``, ``delete``, ``drain``, ``rollout``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from muster.cli import command, connection, live_names, registry_calls
from muster.core import units

if TYPE_CHECKING:
    from muster.manage import client, protocol, rows

_PLAN = ("wave", "act", "name", "type")


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster apply -f fleet.yaml", ""),
        ("muster apply -f fleet.yaml --wait 60s", "fail if not all resources reach their desired state"),
    ],
)
@registry_calls.file_option
@command.duration("--wait", None, "Wait up to this time until all resources stay in their desired state.")
@connection.options
@command.pass_invocation
def apply(
    invocation: command.Invocation, path: Path, wait_s: float | None, to: connection.ConnectionOptions
) -> None:
    """Apply a manifest and keep the resources in the declared state."""
    text = registry_calls.read_text(path)

    async def work(fleet: client.ManageClient) -> rows.ApplyResult:
        return await fleet.apply(text, wait_s=wait_s, progress=say)

    with invocation.printer.progress("applying") as say:
        done = registry_calls.call_registry(invocation, to, work)
    changed, all_ = done.changed_count, sum(done.counts.values())
    invocation.printer.done(done, f"applied: {changed:,} of {all_:,} resources changed")
    for note in done.notes:
        invocation.printer.note(f"note: {note}")


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
    examples=[("muster delete -f fleet.yaml", ""), ("muster delete web-1 web-2 --wait 30s", "")],
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=live_names.RESOURCES)
@click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="Delete the resources of this manifest; '-' reads standard input.",
)
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
    wait_s: float | None,
    force: bool,
    to: connection.ConnectionOptions,
) -> None:
    """Stop resources and delete them, dependent ones first."""
    if bool(names) == bool(path):
        raise click.UsageError("give either names or -f FILE")
    text = registry_calls.read_text(path) if path else ""

    async def work(fleet: client.ManageClient) -> rows.DeleteResult:
        if path is not None:
            done = await fleet.delete_manifest(text, force=force)
        else:
            done = await fleet.delete(*names, force=force)
        if wait_s is not None:
            await fleet.wait_gone(*done.deleting, timeout_s=wait_s)
        return done

    with invocation.printer.waiting("deleting"):
        done = registry_calls.call_registry(invocation, to, work)
    did = "removed" if force else "deleting" if wait_s is None else "deleted"
    invocation.printer.done(done, f"{did} {units.format_count(len(done.deleting), 'resource')}")


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


@click.group(
    cls=command.MusterGroup, examples=[("muster rollout start restart --where \"group = 'web'\"", "")]
)
def rollout() -> None:
    """Run an operation on many resources in batches."""


_ROLLOUT = ("id", "state", "operation", "counts", "unreachable", "reason")


@rollout.command(
    examples=[
        ("muster rollout start restart --where \"group = 'web'\" --batch 10% --pause 5s", ""),
        ("muster rollout start web-1 web-2 restart --max-errors 1 --wait 5m", ""),
    ],
)
@registry_calls.operation_argument
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
    from muster.core import errors
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
        import asyncio

        progress = await fleet.rollout(plan_, *names, where=where)
        try:
            async with asyncio.timeout(wait_s):
                return progress if no_wait else await follow(fleet, progress)
        except TimeoutError:
            raise errors.TimedOut(
                f"the rollout {progress.id} still runs after {units.rounded_duration(wait_s or 0.0)}",
                hint=f"`muster rollout show {progress.id}` shows its steps",
            ) from None

    async def follow(fleet: client.ManageClient, progress: rows.RolloutRow) -> rows.RolloutRow:
        import asyncio

        while progress.state == "running":
            all_ = sum(progress.counts.values()) or 1
            over = all_ - sum(progress.counts.get(state, 0) for state in ("pending", "running"))
            say(f"{over:,} of {all_:,}", over / all_)
            await asyncio.sleep(0.2)
            progress = (await fleet.rollouts(progress.id))[0]
        return progress

    with invocation.printer.progress(f"rolling out {operation}") as say:
        result = registry_calls.call_registry(invocation, to, work)
    invocation.printer.rows([result], _ROLLOUT, of="rollout")
    if result.state == "stopped":
        raise click.exceptions.Exit(1)


@rollout.command("list", examples=[("muster rollout list", "")])
@connection.options
@command.pass_invocation
def list_(invocation: command.Invocation, to: connection.ConnectionOptions) -> None:
    """List rollouts and their results."""
    rollouts = registry_calls.call_registry(invocation, to, lambda fleet: fleet.rollouts())
    invocation.printer.rows(rollouts, _ROLLOUT, of="rollout", empty="no rollouts")


@rollout.command(examples=[("muster rollout show 1f2e3d4c", "")])
@click.argument("id", shell_complete=live_names.ROLLOUTS)
@connection.options
@command.pass_invocation
def show(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Show the state of each resource of a rollout."""
    steps = registry_calls.call_registry(invocation, to, lambda fleet: fleet.rollout_steps(id))
    invocation.printer.rows(steps, ("name", "state", "reason", "result"), of="step", empty="no steps")


@rollout.command(examples=[("muster rollout pause 1f2e3d4c", "")])
@click.argument("id", shell_complete=live_names.ROLLOUTS)
@connection.options
@command.pass_invocation
def pause(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Pause a rollout after the current batch."""
    done = registry_calls.call_registry(invocation, to, lambda fleet: fleet.pause(id))
    invocation.printer.done(done, f"rollout {id} is {done.state}")


@rollout.command(examples=[("muster rollout resume 1f2e3d4c", "")])
@click.argument("id", shell_complete=live_names.ROLLOUTS)
@connection.options
@command.pass_invocation
def resume(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Resume a paused or stopped rollout."""
    done = registry_calls.call_registry(invocation, to, lambda fleet: fleet.resume(id))
    invocation.printer.done(done, f"rollout {id} is {done.state}")
