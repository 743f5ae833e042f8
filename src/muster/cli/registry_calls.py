"""What the commands for resources share."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muster.cli import command, connection, live_names

if TYPE_CHECKING:
    from muster.app.components import bootstrap_client
    from muster.manage import client

T = TypeVar("T")

file_option = click.option(
    "-f",
    "--file",
    "path",
    required=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="The manifest; '-' reads standard input.",
)

operation_argument = functools.partial(
    click.argument, "words", nargs=-1, required=True, shell_complete=live_names.RESOURCE_OPERATION
)


arguments_option = click.option(
    "--argument",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="An argument of the operation: JSON or text. Quote a number that is meant as text: 'NAME=\"1.0\"'.",
)


def split_words(words: tuple[str, ...], where: str) -> tuple[list[str], str]:
    """The resources and the operation of ``[RESOURCE]... OPERATION``; a predicate replaces the resources."""
    *names, operation = words
    if bool(names) == bool(where):
        raise click.UsageError("give either resources or --where PREDICATE, and then the operation")
    return names, operation


def call_registry(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    work: Callable[[client.ManageClient], Awaitable[T]],
) -> T:
    """Connect, call ``work`` with a client, and return its result."""
    from muster.manage import client

    return connection.call(invocation, to, lambda bus: work(client.ManageClient(bus)))


def ask_domain(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    work: Callable[[bootstrap_client.BootstrapClient], Awaitable[T]],
) -> T:
    """Send a request to the domain's bootstrap node."""
    from muster.app.components import bootstrap_client

    return connection.call(invocation, to, lambda bus: work(bootstrap_client.BootstrapClient(bus)))


def read_text(path: Path) -> str:
    """The text of a file; '-' reads standard input."""
    try:
        with click.open_file(str(path), encoding="utf-8") as file:
            text: str = file.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{path} is not UTF-8 text: {error.reason}") from error
    return text


def key_values(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` arguments (`command.parse_value`)."""
    return {name: command.parse_value(text) for name, text in command.assignments(arguments).items()}
