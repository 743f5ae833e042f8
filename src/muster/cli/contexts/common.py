"""What the commands for contexts share: the client, and the notation of values and attributes."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection

if TYPE_CHECKING:
    from muster.inform import client, protocol

limit_option = click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    help="Maximum number of results.",
)
after_option = click.option("--after", default="", metavar="KEY", help="Continue after this key.")


@contextlib.asynccontextmanager
async def inform_client(
    invocation: command.Invocation, to: connection.ConnectionOptions, node: str | None = None
) -> AsyncIterator[client.InformClient]:
    from muster.inform import client, protocol

    async with await connection.connect(invocation, to) as bus:
        yield client.InformClient(bus, node=node or protocol.ANY)


def attributes(arguments: tuple[str, ...]) -> dict[str, Any]:
    values = parse_assignments(arguments, "--attribute")
    for name, value in values.items():
        if isinstance(value, list) and not all(isinstance(word, str) for word in value):
            raise click.BadParameter(
                f"{name}={json.dumps(value)}: a list may contain only strings", param_hint="--attribute"
            )
    return values


def parse_assignments(arguments: tuple[str, ...], option: str) -> dict[str, Any]:
    """Parse NAME=VALUE arguments; a value that is not valid JSON is text."""
    values: dict[str, Any] = {}
    for text in arguments:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint=option)
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
        if not isinstance(values[name], str | int | float | bool | list):
            values[name] = value
    return values


def warn_silent(invocation: command.Invocation, result: protocol.FindResult | protocol.ReplicaList) -> None:
    if result.silent:
        invocation.printer.note(f"incomplete: no reply from {result.silent_text}")


def warn_incomplete(invocation: command.Invocation, result: protocol.FindResult) -> None:
    """Print on stderr why the result may be incomplete."""
    if result.more:
        invocation.printer.note(
            f"incomplete: only the first {len(result.contexts):,} are shown; continue with "
            f"--after {shlex.quote(result.reached)}"
        )
    warn_silent(invocation, result)
    for name, why in result.failed.items():
        invocation.printer.note(f"incomplete: {name} could not be searched: {why}")
    for name in result.cut:
        invocation.printer.note(f"incomplete: {name} has more entries than a search of a mount reads")
