"""What the commands of management share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection

if TYPE_CHECKING:
    from muster.manage import client

file_option = click.option(
    "-f",
    "--file",
    "path",
    required=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="The manifest; - reads standard input.",
)


def call_registry(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    work: Callable[[client.ManageClient], Awaitable[Any]],
) -> Any:
    """What ``work`` returns, done over a connection."""

    async def ask() -> Any:
        from muster.manage import client

        async with await connection.connect(invocation, to) as bus:
            return await work(client.ManageClient(bus))

    return command.run(ask())


def ask_domain(
    invocation: command.Invocation, to: connection.ConnectionOptions, verb: str, **arguments: Any
) -> Any:
    """A question to the domain's bootstrap node."""

    async def ask() -> Any:
        from muster.app.components import management

        async with await connection.connect(invocation, to) as bus:
            return await management.request_bootstrap(bus, verb, **arguments)

    return command.run(ask())


def read_text(path: Path) -> str:
    with click.open_file(str(path), encoding="utf-8") as file:
        text: str = file.read()
        return text


def format_time(at_ms: int) -> str:
    import datetime

    if not at_ms:
        return ""
    return datetime.datetime.fromtimestamp(at_ms / 1000).astimezone().isoformat(" ", "seconds")


def key_values(given: tuple[str, ...]) -> dict[str, Any]:
    """``NAME=VALUE`` words; a value that reads as JSON is what it says, anything else is text."""
    import json

    found: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{one!r} is not NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
