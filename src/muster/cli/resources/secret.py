"""``muster secret``: secret values for resources."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from muster.cli import command, connection, leaf, live_names, registry_calls
from muster.manage import operations


@click.group(
    cls=command.MusterGroup,
    examples=[
        ("muster secret set db-password < password.txt", "manifests refer to it as store:db-password"),
        ("muster secret list", ""),
    ],
)
def secret() -> None:
    """Manage the secrets in the domain's store.

    This command encrypts a secret before sending it. Only the agents of resources that refer to it with
    {secret: "store:NAME"} receive it. A running resource uses a new value after a restart.
    """


@secret.command(
    "set",
    examples=[
        ("muster secret set db-password", "prompts for the value"),
        ("muster secret set db-password < password.txt", ""),
        ("muster secret set tls-key --file key.pem", ""),
    ],
)
@click.argument("name", shell_complete=live_names.SECRETS)
@click.option(
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the value from this file.",
)
@connection.options
@command.pass_invocation
def set_(
    invocation: command.Invocation, name: str, path: Path | None, to: connection.ConnectionOptions
) -> None:
    """Store a value from standard input or a file, without the final newline."""
    value = _value(name, path)
    done = registry_calls.call_registry(invocation, to, lambda fleet: fleet.set_secret(name, value))
    more = done.used_by_count - len(done.used_by)
    names = ", ".join(done.used_by) + (f" and {more:,} more" if more else "")
    using = f"; restart the resources that use it: {names}" if names else ""
    invocation.printer.done(done, f"{name} was stored{using}")


def _value(name: str, path: Path | None) -> str:
    from muster.core import errors
    from muster.core.settings import loader

    if path is None and sys.stdin.isatty():
        entered: str = click.prompt(name, hide_input=True, confirmation_prompt=True, err=True)
        return entered
    most = loader.MAX_SECRET_BYTES + len("\r\n")
    try:
        with click.open_file("-" if path is None else str(path), encoding="utf-8") as file:
            text: str = file.read(most + 1)
    except UnicodeDecodeError as error:
        raise click.UsageError(f"a secret is UTF-8 text: {error}") from error
    if len(text) > most:
        raise errors.LimitExceeded(f"a secret has at most {loader.MAX_SECRET_BYTES} bytes")
    return text.rstrip("\r\n")


leaf.add(
    secret,
    operations.SECRETS,
    name="list",
    of="secret",
    empty="no secrets",
    examples=[("muster secret list", "names, never values")],
)
leaf.add(
    secret,
    operations.DELETE_SECRET,
    click.argument("name", shell_complete=live_names.SECRETS),
    name="delete",
    done="{name} was deleted",
    examples=[("muster secret delete db-password", "")],
)
