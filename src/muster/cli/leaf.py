"""Commands that do what an operation of a service does, and nothing more.

    leaf.add(alert, operations.RESOLVE, _rule, _about, name="resolve", done="resolved: {rule} {about}",
             examples=[("muster alert resolve silent node:web-7", "")])

The name, the arguments and the sentence are the command's own; the help line, the columns and what is
recorded in the activity log are those of the declaration (`muster.bus.rpc.operations`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from muster.bus.rpc import operations
from muster.cli import command, connection

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def add(
    group: click.Group,
    declared: operations.ServiceOperation,
    *parameters: Decorator,
    examples: Sequence[tuple[str, str]],
    name: str = "",
    more: str = "",
    done: str = "",
    of: str = "",
    empty: str = "",
) -> None:
    """Add the command of an operation; ``parameters`` (of click) have the names of the request.

    ``more``: help after the first line. ``done``: what it prints, with the names of the request and
    ``result``; else it prints rows (``of`` and ``empty`` as in `Printer.rows`) or facts.
    """

    def run(invocation: command.Invocation, /, to: connection.ConnectionOptions, **request: Any) -> None:
        result = connection.call(invocation, to, lambda bus: declared.call(bus, request))
        printer = invocation.printer
        if declared.columns:
            printer.rows(result, declared.columns, of=of, empty=empty)
        elif done:
            printer.done(request if result is None else result, done.format(result=result, **request))
        else:
            printer.facts(result)

    decorated: Callable[..., Any] = connection.options(command.pass_invocation(run))
    for decorate in reversed(parameters):
        decorated = decorate(decorated)
    group.command(
        name or declared.method.replace("_", "-"),
        help=f"{declared.help}\n\n{more}" if more else declared.help,
        acts=None if declared.records else (declared.action, declared.target),
        examples=examples,
    )(decorated)
