"""``muster secret``: values that resources need and nobody reads."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from muster.cli import command, connection, registry_calls


@click.group(
    cls=command.MusterGroup,
    examples=[
        ("muster secret set db-password < password.txt", "a manifest refers to it as store:db-password"),
        ("muster secret list", ""),
    ],
)
def secret() -> None:
    """Keep secrets in the domain's store.

    They are sealed before they leave this command, and told to nobody but the agents whose resources refer
    to them, {secret: "store:NAME"}. What runs already takes a new value when it is restarted.
    """


@secret.command(
    "set",
    examples=[
        ("muster secret set db-password", "asks for it, and does not show it"),
        ("muster secret set db-password < password.txt", ""),
        ("muster secret set tls-key --file key.pem", ""),
    ],
)
@click.argument("name")
@click.option(
    "--file", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Read it from here."
)
@connection.options
@command.pass_invocation
def set_(
    invocation: command.Invocation, name: str, path: Path | None, to: connection.ConnectionOptions
) -> None:
    """Keep a value, from standard input or a file, without the newline it ends with."""
    value = _value(name, path)
    done = registry_calls.call_registry(invocation, to, lambda fleet: fleet.set_secret(name, value))
    more = done["used_by_count"] - len(done["used_by"])
    names = ", ".join(done["used_by"]) + (f" and {more:,} more" if more else "")
    using = f"; restart what uses it: {names}" if names else ""
    invocation.printer.done(done, f"{name} is kept{using}")


def _value(name: str, path: Path | None) -> str:
    if path is None and sys.stdin.isatty():
        asked: str = click.prompt(name, hide_input=True, confirmation_prompt=True, err=True)
        return asked
    try:
        text = path.read_text() if path is not None else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"a secret is UTF-8 text: {error}") from error
    return text.rstrip("\r\n")


@secret.command("list", examples=[("muster secret list", "names, never values")])
@connection.options
@command.pass_invocation
def list_(invocation: command.Invocation, to: connection.ConnectionOptions) -> None:
    """List the names of secrets, and what uses them."""
    rows = registry_calls.call_registry(invocation, to, lambda fleet: fleet.secrets())
    for row in rows:
        row["at"] = registry_calls.format_time(row["at_ms"])
    invocation.printer.rows(rows, ("name", "by", "at", "used_by"), of="secret", empty="no secrets")


@secret.command(examples=[("muster secret delete db-password", "")])
@click.argument("name")
@connection.options
@command.pass_invocation
def delete(invocation: command.Invocation, name: str, to: connection.ConnectionOptions) -> None:
    """Delete a secret that nothing refers to."""
    done = registry_calls.call_registry(invocation, to, lambda fleet: fleet.delete_secret(name))
    invocation.printer.done(done, f"{name} is deleted")
