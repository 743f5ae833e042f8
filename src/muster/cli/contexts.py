"""What the commands of the information service share: its client, and values and attributes as people write
them."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import click

from muster.cli import base, connection

if TYPE_CHECKING:
    from muster.inform import client


@contextlib.asynccontextmanager
async def connected(
    invocation: base.Invocation, to: connection.Options, node: str | None = None
) -> AsyncIterator[client.Client]:
    from muster.inform import client, protocol

    async with await connection.connect(invocation, to) as bus:
        yield client.Client(bus, node=node or protocol.ANY)


def value(data: bytes | None) -> dict[str, Any]:
    """As text where it is text; else in base 64, under another name."""
    if data is None:
        return {"value": None}
    try:
        return {"value": data.decode()}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(data).decode()}


def attributes(given: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--attribute")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
        if not isinstance(found[name], str | int | float | bool | list):
            found[name] = value
    return found
