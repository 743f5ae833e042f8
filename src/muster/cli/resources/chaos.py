"""``muster chaos``: failure drills. Killed processes are restarted by the domain."""

from __future__ import annotations

import click

from muster.cli import command, connection, live_names, registry_calls


@click.group(cls=command.MusterGroup, examples=[("muster chaos kill manager-2", "")])
def chaos() -> None:
    """Kill processes of a domain, for failure drills."""


@chaos.command(
    examples=[("muster chaos kill manager-2", ""), ("muster chaos kill registry-1", "")],
)
@click.argument("name", shell_complete=live_names.PROCESSES)
@connection.options
@command.pass_invocation
def kill(invocation: command.Invocation, name: str, to: connection.ConnectionOptions) -> None:
    """Kill a process of the domain with SIGKILL, like a crash."""
    done = registry_calls.ask_domain(invocation, to, lambda domain: domain.kill(name))
    invocation.printer.done(done, f"killed {name} (pid {done.pid})")


@chaos.command("list", examples=[("muster chaos list", "")])
@connection.options
@command.pass_invocation
def list_(invocation: command.Invocation, to: connection.ConnectionOptions) -> None:
    """List the processes that can be killed."""
    rows = registry_calls.ask_domain(invocation, to, lambda domain: domain.processes())
    invocation.printer.rows(rows, ("name", "state", "pid", "starts", "reason"), of="process")
