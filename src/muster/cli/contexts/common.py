"""What the commands of the information service share: its client, and values and attributes as people write
them."""

from __future__ import annotations

import base64
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
    "--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="The most to list."
)
after_option = click.option("--after", default="", metavar="KEY", help="Go on behind this key.")


@contextlib.asynccontextmanager
async def inform_client(
    invocation: command.Invocation, to: connection.ConnectionOptions, node: str | None = None
) -> AsyncIterator[client.InformClient]:
    from muster.inform import client, protocol

    async with await connection.connect(invocation, to) as bus:
        yield client.InformClient(bus, node=node or protocol.ANY)


def render_value(data: bytes | None) -> dict[str, Any]:
    """As text where it is text; else in base 64, under another name."""
    if data is None:
        return {"value": None}
    try:
        return {"value": data.decode()}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(data).decode()}


def attributes(given: tuple[str, ...]) -> dict[str, Any]:
    found = parse_assignments(given, "--attribute")
    for name, one in found.items():
        if isinstance(one, list) and not all(isinstance(word, str) for word in one):
            raise click.BadParameter(
                f"{name}={json.dumps(one)}: a list holds strings only", param_hint="--attribute"
            )
    return found


def parse_assignments(given: tuple[str, ...], option: str) -> dict[str, Any]:
    """NAME=VALUE, the value as JSON where it is some: else it is text."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint=option)
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
        if not isinstance(found[name], str | int | float | bool | list):
            found[name] = value
    return found


def warn_incomplete(invocation: command.Invocation, found: protocol.FindResult) -> None:
    """Beside the answer: why there may be more than it shows."""
    if found.more:
        invocation.printer.note(
            f"not complete: the first {len(found.contexts):,} are shown; the next with "
            f"--after {shlex.quote(found.reached)}"
        )
    if found.silent:
        invocation.printer.note(f"not complete: no answer from {found.silent_text}")
    for name, why in found.failed.items():
        invocation.printer.note(f"not complete: {name} could not be searched: {why}")
    for name in found.cut:
        invocation.printer.note(f"not complete: {name} has more entries than are searched in a mount")
