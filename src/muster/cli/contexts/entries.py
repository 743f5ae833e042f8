"""``muster inform session`` and ``muster inform service``: activities and service entries."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muster.cli import command, connection
from muster.cli.contexts import common
from muster.inform import operations

if TYPE_CHECKING:
    from muster.inform import activities, rows, service_entries

T = TypeVar("T")


@click.group(cls=command.MusterGroup, examples=[("muster inform session begin --timeout 10m", "")])
def session() -> None:
    """Manage WS-Context activities and their contents."""


def _in_sessions(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    act: Callable[[activities.Activities], Awaitable[T]],
) -> T:
    from muster.inform import activities

    return common.call(invocation, to, lambda held: act(activities.Activities(held, time.time_ns)))


def _session(activity: activities.Activity) -> rows.ActivityRow:
    from muster.inform import rows

    return rows.activity_row(activity, time.time())


@session.command(
    acts=("begin-session", "{parent}"),
    examples=[("muster inform session begin --parent ID", "inside another activity")],
)
@click.option("--parent", default="", metavar="ID", help="Parent activity.")
@command.duration("--timeout", None, "End the activity after this time.")
@connection.options
@command.pass_invocation
def begin(
    invocation: command.Invocation, parent: str, timeout_s: float | None, to: connection.ConnectionOptions
) -> None:
    """Begin an activity."""
    made = _in_sessions(invocation, to, lambda all_: all_.begin(parent=parent, timeout_s=timeout_s))
    invocation.printer.done(_session(made), made.id)


@session.command(acts=("complete-session", "{id}"), examples=[("muster inform session complete ID", "")])
@click.argument("id")
@connection.options
@command.pass_invocation
def complete(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Complete an activity. Its child activities must be completed first."""
    done = _in_sessions(invocation, to, lambda all_: all_.complete(id))
    invocation.printer.done(_session(done), f"{done.id} is {done.status.value}")


@session.command(examples=[("muster inform session status ID", "")])
@click.argument("id")
@connection.options
@command.pass_invocation
def status(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Show whether an activity is active or completed. Fails if the activity does not exist."""
    state = _in_sessions(invocation, to, lambda all_: all_.get(id)).status
    invocation.printer.done({"id": id, "status": state.value}, state.value)


@session.command(
    acts=("session-contents", "{id}", "new"),
    examples=[
        ("muster inform session contents ID", "print the contents"),
        ("muster inform session contents ID '<order/>'", "replace the contents"),
    ],
)
@click.argument("id")
@click.argument("new", required=False, metavar="[CONTENTS]")
@connection.options
@command.pass_invocation
def contents(
    invocation: command.Invocation, id: str, new: str | None, to: connection.ConnectionOptions
) -> None:
    """Print or replace the contents of an activity. '-' reads them from stdin."""
    if new is None:
        invocation.printer.facts(_session(_in_sessions(invocation, to, lambda all_: all_.get(id))))
        return
    data = sys.stdin.buffer.read() if new == "-" else new.encode()
    done = _in_sessions(invocation, to, lambda all_: all_.set_contents(id, data))
    invocation.printer.done(_session(done), f"the contents of {id} were replaced: {len(data)} bytes")


@click.group(cls=command.MusterGroup, examples=[("muster inform service find \"name LIKE 'map%'\"", "")])
def service() -> None:
    """Save, show, find and delete UDDI-style service entries."""


def _in_services(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    act: Callable[[service_entries.ServiceEntries], Awaitable[T]],
) -> T:
    from muster.inform import service_entries

    return common.call(invocation, to, lambda held: act(service_entries.ServiceEntries(held)))


def _entry(entry: service_entries.ServiceEntry, source: str = "") -> rows.ServiceEntryRow:
    from muster.inform import rows

    return rows.entry_row(entry, source)


@service.command(
    acts=("save-service", "{name}"),
    examples=[
        ("muster inform service save maps --access http://h/maps -a lat=39.1 -a lon=-86.5 --lease 1m", ""),
    ],
)
@click.argument("name")
@click.option("--id", "id_", metavar="ID", default="", help="ID of an existing entry, to change it.")
@click.option("--access", multiple=True, metavar="URL", help="Access point (URL); may be repeated.")
@click.option(
    "--category",
    "categories",
    multiple=True,
    metavar="KEY=VALUE",
    help="A keyed reference (category); may be repeated.",
)
@click.option("-a", "--attribute", "metadata", multiple=True, metavar="NAME=VALUE", help="Metadata.")
@click.option("--description", default="", help="Free text.")
@command.duration("--lease", "0", "Delete the entry after this time unless renewed.", may_be_zero=True)
@connection.options
@command.pass_invocation
def save(
    invocation: command.Invocation,
    /,
    name: str,
    id_: str,
    metadata: tuple[str, ...],
    description: str,
    lease_s: float,
    to: connection.ConnectionOptions,
    **more: Any,
) -> None:
    """Publish a service entry."""
    from muster.inform import service_entries

    for category in more["categories"]:
        if not all(category.partition("=")):
            raise click.BadParameter(f"{category!r} is not KEY=VALUE", param_hint="--category")
    entry = service_entries.ServiceEntry(
        id=id_, name=name, metadata=common.attributes(metadata), description=description.encode(), **more
    )
    made = _in_services(invocation, to, lambda all_: all_.save(entry, lease_s=lease_s))
    invocation.printer.done(_entry(made), made.id)


@service.command(examples=[("muster inform service show ID", "")])
@click.argument("id")
@connection.options
@command.pass_invocation
def show(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Print a service entry."""
    invocation.printer.facts(_entry(_in_services(invocation, to, lambda all_: all_.get(id))))


@service.command(
    examples=[
        ("muster inform service find \"categories CONTAINS 'uddi:org:types=wsdl'\"", ""),
        ("muster inform service find --box -90 35 -80 45", "west, south, east, north"),
    ],
)
@click.argument("predicate", default="")
@click.option(
    "--box", type=float, nargs=4, metavar="W S E N", help="Only entries inside, by their lat and lon."
)
@common.limit_option
@common.after_option
@connection.options
@command.pass_invocation
def find(
    invocation: command.Invocation,
    predicate: str,
    box: tuple[float, float, float, float] | None,
    limit: int,
    after: str,
    to: connection.ConnectionOptions,
) -> None:
    """List the service entries that satisfy a predicate.

    The result includes entries of mounted registries; the column `source` names the registry.
    """
    from muster.inform import service_entries

    area = service_entries.GeoBox(*box) if box else None
    result = _in_services(
        invocation, to, lambda all_: all_.search(predicate, box=area, limit=limit, after=after)
    )
    entries = [_entry(service_entries.from_context(context), context.source) for context in result.contexts]
    invocation.printer.rows(entries, operations.ENTRIES, empty="no service entry matches")
    common.warn_incomplete(invocation, result)


@service.command(acts=("delete-service", "{id}"), examples=[("muster inform service delete ID", "")])
@click.argument("id")
@connection.options
@command.pass_invocation
def delete(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Delete a service entry."""
    _in_services(invocation, to, lambda all_: all_.delete(id))
    invocation.printer.done({"id": id}, f"{id} was deleted")
