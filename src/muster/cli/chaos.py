"""``muster chaos``: drills. What is killed here comes back, or it was no good."""

from __future__ import annotations

import click

from muster.cli import base, connection, managing


@click.group(cls=base.Group, examples=[("muster chaos kill manager-2", "")])
def chaos() -> None:
    """Kill parts of a domain, for drills."""


@chaos.command(
    examples=[("muster chaos kill manager-2", ""), ("muster chaos kill registry-1", "")],
)
@click.argument("name")
@connection.options
@base.pass_invocation
def kill(invocation: base.Invocation, name: str, to: connection.Options) -> None:
    """Kill one of the domain's processes as a crash would (SIGKILL)."""
    done = managing.ask_domain(invocation, to, "kill", name=name)
    invocation.printer.done(done, f"killed {name} (pid {done['pid']})")


@chaos.command("list", examples=[("muster chaos list", "")])
@connection.options
@base.pass_invocation
def list_(invocation: base.Invocation, to: connection.Options) -> None:
    """List the processes that can be killed."""
    rows = managing.ask_domain(invocation, to, "processes")
    invocation.printer.rows(rows, ("name", "state", "pid", "starts", "reason"), of="process")
