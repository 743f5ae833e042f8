"""What should be: ``muster apply``, ``plan``, ``diff``, ``delete``, ``drain``, ``rollout``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection, registry_calls

if TYPE_CHECKING:
    from muster.manage import client

_PLAN = ("wave", "act", "name", "type")


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster apply -f fleet.yaml", ""),
        ("muster apply -f fleet.yaml --wait 60s", "return when all of it is in its desired state"),
    ],
)
@registry_calls.file_option
@command.duration("--wait", None, "Wait so long for everything to be in its desired state.")
@connection.options
@command.pass_invocation
def apply(
    invocation: command.Invocation, path: Path, wait_s: float | None, to: connection.ConnectionOptions
) -> None:
    """Make what a manifest says be so, and keep it so."""
    text = registry_calls.read_text(path)

    async def work(fleet: client.ManageClient) -> Any:
        return await fleet.apply(text, wait_s=wait_s, progress=say)

    with invocation.printer.progress("applying") as say:
        done = registry_calls.call_registry(invocation, to, work)
    changed, all_ = done["changed_count"], sum(done["counts"].values())
    invocation.printer.done(done, f"applied: {changed:,} of {all_:,} resources changed")


@click.command(
    cls=command.MusterCommand, examples=[("muster plan -f fleet.yaml", "in waves: each goes at once")]
)
@registry_calls.file_option
@connection.options
@command.pass_invocation
def plan(invocation: command.Invocation, path: Path, to: connection.ConnectionOptions) -> None:
    """Say what an apply would do, and do nothing."""
    lines = registry_calls.call_registry(
        invocation, to, lambda fleet: fleet.plan(registry_calls.read_text(path))
    )
    invocation.printer.rows(lines, _PLAN, of="step")


@click.command(cls=command.MusterCommand, examples=[("muster diff -f fleet.yaml", "")])
@registry_calls.file_option
@connection.options
@command.pass_invocation
def diff(invocation: command.Invocation, path: Path, to: connection.ConnectionOptions) -> None:
    """Say field by field what an apply would change."""
    lines = registry_calls.call_registry(
        invocation, to, lambda fleet: fleet.plan(registry_calls.read_text(path))
    )
    rows = [
        {"name": line["name"], "field": field, "is": before, "would_be": after}
        for line in lines
        for field, (before, after) in (line["changes"] or {}).items()
    ]
    rows += [
        {"name": line["name"], "field": "", "is": "absent", "would_be": "there"}
        for line in lines
        if line["act"] == "create"
    ]
    invocation.printer.rows(rows, ("name", "field", "is", "would_be"), of="change", empty="no difference")


@click.command(
    cls=command.MusterCommand,
    examples=[("muster delete -f fleet.yaml", ""), ("muster delete web-1 web-2 --wait 30s", "")],
)
@click.argument("names", nargs=-1)
@click.option("-f", "--file", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@command.duration("--wait", None, "Wait so long for everything to be gone.")
@click.option(
    "--force",
    is_flag=True,
    help="Where a machine is lost: remove them at once, without their agents. What still runs there goes on.",
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
    """Take resources down and forget them, those that depend on others first."""
    if bool(names) == bool(path):
        raise click.UsageError("give names or -f FILE, one of them")

    async def work(fleet: client.ManageClient) -> Any:
        if path is not None:
            done = await fleet.delete_manifest(registry_calls.read_text(path), force=force)
        else:
            done = await fleet.delete(*names, force=force)
        if wait_s is not None:
            await fleet.wait_gone(*done["deleting"], timeout_s=wait_s)
        return done

    done = registry_calls.call_registry(invocation, to, work)
    did = "removed" if force else "deleting"
    invocation.printer.done(done, f"{did} {len(done['deleting'])} resources")


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster drain host-a", "stop all of an agent's resources, and give it no more"),
        ("muster drain web-1", ""),
        ("muster drain host-a --undo", ""),
    ],
)
@click.argument("name")
@click.option("--undo", is_flag=True, help="Want it up again.")
@connection.options
@command.pass_invocation
def drain(invocation: command.Invocation, name: str, undo: bool, to: connection.ConnectionOptions) -> None:
    """Let a resource, or all of an agent's, finish and stop."""
    done = registry_calls.call_registry(
        invocation, to, lambda fleet: fleet.undrain(name) if undo else fleet.drain(name)
    )
    invocation.printer.done(done, f"{done['count']} resources {'up again' if undo else 'draining'}")


@click.group(
    cls=command.MusterGroup, examples=[("muster rollout start restart --where \"group = 'web'\"", "")]
)
def rollout() -> None:
    """Do the same to many resources, some at a time."""


_ROLLOUT = ("id", "state", "operation", "counts", "unreachable", "reason")


@rollout.command(
    examples=[
        ("muster rollout start restart --where \"group = 'web'\" --batch 10% --pause 5s", ""),
        ("muster rollout start restart web-1 web-2 --max-errors 1", ""),
    ],
)
@click.argument("operation")
@click.argument("names", nargs=-1)
@click.option("--where", default="", metavar="PREDICATE", help="On the resources of which this is true.")
@click.option("--batch", default="1", show_default=True, help="How many at a time: a count, or a part (10%).")
@command.duration("--pause", None, "Between two batches.")
@click.option("--max-errors", type=click.IntRange(0), default=0, show_default=True, help="Stop after more.")
@click.option("--argument", "arguments", multiple=True, metavar="NAME=VALUE", help="For the operation.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when it is over.")
@connection.options
@command.pass_invocation
def start(
    invocation: command.Invocation,
    /,
    operation: str,
    names: tuple[str, ...],
    where: str,
    batch: str,
    pause_s: float | None,
    max_errors: int,
    arguments: tuple[str, ...],
    wait: bool,
    to: connection.ConnectionOptions,
) -> None:
    """Begin a rollout of OPERATION."""
    wanted = {
        "operation": operation,
        "arguments": registry_calls.key_values(arguments),
        "batch": batch,
        "pause_s": pause_s or 0.0,
        "errors_max": max_errors,
    }

    async def work(fleet: client.ManageClient) -> Any:
        import asyncio

        found = await fleet.rollout(wanted, *names, where=where)
        while wait and found["state"] == "running":
            all_ = sum(found["counts"].values()) or 1
            over = all_ - sum(found["counts"].get(state, 0) for state in ("pending", "running"))
            say(f"{over:,} of {all_:,}", over / all_)
            await asyncio.sleep(0.2)
            found = (await fleet.rollouts(found["id"]))[0]
        return found

    with invocation.printer.progress(f"rolling out {operation}") as say:
        found = registry_calls.call_registry(invocation, to, work)
    invocation.printer.rows([found], _ROLLOUT, of="rollout")
    if found["state"] == "stopped":
        raise click.exceptions.Exit(1)


@rollout.command("list", examples=[("muster rollout list", "")])
@connection.options
@command.pass_invocation
def list_(invocation: command.Invocation, to: connection.ConnectionOptions) -> None:
    """List rollouts and how they went."""
    rows = registry_calls.call_registry(invocation, to, lambda fleet: fleet.rollouts())
    invocation.printer.rows(rows, _ROLLOUT, of="rollout", empty="no rollouts")


@rollout.command(examples=[("muster rollout show 1f2e3d4c", "")])
@click.argument("id")
@connection.options
@command.pass_invocation
def show(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Show the state of each resource of a rollout."""
    rows = registry_calls.call_registry(invocation, to, lambda fleet: fleet.rollout_steps(id))
    invocation.printer.rows(rows, ("name", "state", "reason", "result"), of="step", empty="no steps")


@rollout.command(examples=[("muster rollout pause 1f2e3d4c", "")])
@click.argument("id")
@connection.options
@command.pass_invocation
def pause(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Begin no further batch."""
    done = registry_calls.call_registry(invocation, to, lambda fleet: fleet.pause(id))
    invocation.printer.done(done, f"rollout {id} is {done['state']}")


@rollout.command(examples=[("muster rollout resume 1f2e3d4c", "")])
@click.argument("id")
@connection.options
@command.pass_invocation
def resume(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Go on with a rollout that was paused or stopped."""
    done = registry_calls.call_registry(invocation, to, lambda fleet: fleet.resume(id))
    invocation.printer.done(done, f"rollout {id} is {done['state']}")
