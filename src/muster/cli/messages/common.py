"""What the commands for JMS messages have in common: options, destinations, properties and the connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection

if TYPE_CHECKING:
    from muster.message import destinations
    from muster.message.client import api

selector = click.option(
    "--where", "selector", metavar="PREDICATE", help="Only messages that this selector matches."
)


properties = click.option(
    "-p", "--property", "properties", multiple=True, metavar="NAME=VALUE", help="A property; may be repeated."
)


def with_connection(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    work: Callable[[api.Connection], Awaitable[Any]],
    client_id: str | None = None,
) -> Any:
    async def run() -> Any:
        from muster.message.client import api

        bus = await connection.connect(invocation, to)
        async with api.Connection(bus, client_id=client_id, owns_bus=True) as connected:
            return await work(connected)

    return command.run(run())


def destination(text: str) -> destinations.Destination:
    """Parse a destination. The prefix is required: a mistyped queue would otherwise become a topic."""
    from muster.message import destinations

    if not text.startswith(("queue:", "topic:", "temporary-queue:", "temporary-topic:")):
        example = f"queue:{text.rpartition(':')[2]}"
        raise click.BadParameter(
            f"{text!r} is neither queue:NAME nor topic:NAME, such as {example}", param_hint="DESTINATION"
        )
    return destinations.Destination.parse(text)


def topic(text: str) -> destinations.Destination:
    """Parse the destination of a command for topics only."""
    where = destination(text)
    if where.is_queue or where.is_temporary:
        raise click.BadParameter(f"{text!r} is no topic:NAME", param_hint="TOPIC")
    return where


def properties_of(texts: tuple[str, ...]) -> dict[str, Any]:
    """Numbers and truth values as JSON writes them; everything else is text."""
    values = command.assignments(texts, "--property")
    parsed = {name: command.parse_value(text) for name, text in values.items()}
    return {name: value if isinstance(value, int | float) else values[name] for name, value in parsed.items()}
