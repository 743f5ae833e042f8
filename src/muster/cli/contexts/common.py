"""What the commands for contexts share: the client, and the notation of values and attributes."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muster.cli import command, connection

if TYPE_CHECKING:
    from muster.inform import client, protocol

T = TypeVar("T")

limit_option = command.limit(100, "Maximum number of results.", at_most=10_000)
after_option = click.option("--after", default="", metavar="KEY", help="Continue after this key.")


@contextlib.asynccontextmanager
async def inform_client(
    invocation: command.Invocation, to: connection.ConnectionOptions, node: str | None = None
) -> AsyncIterator[client.InformClient]:
    from muster.inform import client, protocol

    async with await connection.connect(invocation, to) as bus:
        yield client.InformClient(bus, node=node or protocol.ANY)


def call(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    work: Callable[[client.InformClient], Awaitable[T]],
    node: str | None = None,
) -> T:
    """Connect, await ``work`` with a client, and return its result."""

    async def connected() -> T:
        async with inform_client(invocation, to, node) as held:
            return await work(held)

    return command.run(connected())


def attributes(arguments: tuple[str, ...]) -> dict[str, Any]:
    values = parse_assignments(arguments, "--attribute")
    for name, value in values.items():
        if isinstance(value, list) and not all(isinstance(word, str) for word in value):
            raise click.BadParameter(
                f"{name}={json.dumps(value)}: a list may contain only strings", param_hint="--attribute"
            )
    return values


def parse_assignments(arguments: tuple[str, ...], option: str) -> dict[str, Any]:
    """Parse NAME=VALUE arguments (`command.parse_value`)."""
    texts = command.assignments(arguments, option)
    values = {name: command.parse_value(text) for name, text in texts.items()}
    return {
        name: value if isinstance(value, str | int | float | bool | list) else texts[name]
        for name, value in values.items()
    }


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
