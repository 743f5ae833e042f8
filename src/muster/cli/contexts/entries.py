"""``muster inform session`` and ``muster inform service``: activities and service entries."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muster.cli import command, connection
from muster.cli.contexts import common as contexts_

if TYPE_CHECKING:
    from muster.inform import activities, service_entries

T = TypeVar("T")


@click.group(cls=command.MusterGroup, examples=[("muster inform session begin --timeout 600", "")])
def session() -> None:
    """Activities of WS-Context: begin, complete, ask for the status, keep contents."""


def _in_sessions(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    act: Callable[[activities.Activities], Awaitable[T]],
) -> T:
    async def work() -> T:
        from muster.inform import activities

        async with contexts_.inform_client(invocation, to) as contexts:
            return await act(activities.Activities(contexts, time.time_ns))

    return command.run(work())


def _session(found: activities.Activity) -> dict[str, Any]:
    return {
        "id": found.id,
        "status": found.status.value,
        "parent": found.parent or None,
        **contexts_.render_value(found.contents),
        "timeout_s": round(found.expires_at_ns / 1e9 - time.time(), 3),
        "version": found.version,
    }


@session.command(
    acts=("begin-session", "{parent}"),
    examples=[("muster inform session begin --parent ID", "inside another activity")],
)
@click.option("--parent", default="", metavar="ID", help="Begin it inside this activity.")
@command.duration("--timeout", None, "It ends by itself after so long.")
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
    """Complete an activity; those inside it must be complete."""
    done = _in_sessions(invocation, to, lambda all_: all_.complete(id))
    invocation.printer.done(_session(done), f"{done.id} is {done.status.value}")


@session.command(examples=[("muster inform session status ID", "")])
@click.argument("id")
@connection.options
@command.pass_invocation
def status(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Say whether an activity is active or completed. It is an error if there is none of that id."""
    found = _in_sessions(invocation, to, lambda all_: all_.get(id)).status
    invocation.printer.done({"id": id, "status": found.value}, found.value)


@session.command(
    acts=("session-contents", "{id}", "new"),
    examples=[
        ("muster inform session contents ID", "what it holds"),
        ("muster inform session contents ID '<order/>'", "replace it"),
    ],
)
@click.argument("id")
@click.argument("new", required=False, metavar="CONTENTS")
@connection.options
@command.pass_invocation
def contents(
    invocation: command.Invocation, id: str, new: str | None, to: connection.ConnectionOptions
) -> None:
    """Print what an activity holds, or replace it. '-' takes it from stdin."""
    if new is None:
        invocation.printer.facts(_session(_in_sessions(invocation, to, lambda all_: all_.get(id))))
        return
    data = sys.stdin.buffer.read() if new == "-" else new.encode()
    done = _in_sessions(invocation, to, lambda all_: all_.set_contents(id, data))
    invocation.printer.done(_session(done), f"{id} holds {len(data)} bytes")


@click.group(cls=command.MusterGroup, examples=[("muster inform service find \"name LIKE 'map%'\"", "")])
def service() -> None:
    """UDDI-style service entries: save, show, find, delete."""


def _in_services(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    act: Callable[[service_entries.ServiceEntries], Awaitable[T]],
) -> T:
    async def work() -> T:
        from muster.inform import service_entries

        async with contexts_.inform_client(invocation, to) as contexts:
            return await act(service_entries.ServiceEntries(contexts))

    return command.run(work())


def _entry(found: service_entries.ServiceEntry) -> dict[str, Any]:
    return {
        "id": found.id,
        "name": found.name,
        "access": list(found.access),
        "categories": list(found.categories),
        "metadata": dict(found.metadata),
        **contexts_.render_value(found.description),
        "version": found.version,
        "owner": found.owner,
    }


@service.command(
    acts=("save-service", "{name}"),
    examples=[
        ("muster inform service save maps --access http://h/maps -a lat=39.1 -a lon=-86.5 --lease 60", ""),
    ],
)
@click.argument("name")
@click.option("--id", "id_", default="", help="Of an entry that is there, to change it.")
@click.option("--access", multiple=True, metavar="URL", help="Where it can be called; may be repeated.")
@click.option("--category", "categories", multiple=True, metavar="KEY=VALUE", help="A keyed reference.")
@click.option("-a", "--attribute", "metadata", multiple=True, metavar="NAME=VALUE", help="Metadata.")
@click.option("--description", default="", help="Free text.")
@command.duration("--lease", "0", "It goes unless renewed.", may_be_zero=True)
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

    for one in more["categories"]:
        if not all(one.partition("=")):
            raise click.BadParameter(f"{one!r} is not KEY=VALUE", param_hint="--category")
    entry = service_entries.ServiceEntry(
        id=id_, name=name, metadata=contexts_.attributes(metadata), description=description.encode(), **more
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
@contexts_.limit_option
@contexts_.after_option
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

    Those of mounted registries are among them, each with its source.
    """
    from muster.inform import service_entries

    area = service_entries.GeoBox(*box) if box else None
    found = _in_services(
        invocation, to, lambda all_: all_.search(predicate, box=area, limit=limit, after=after)
    )
    rows = [{**_entry(service_entries.from_context(one)), "source": one.source} for one in found.contexts]
    columns = ("id", "name", "access", "metadata", "source")
    invocation.printer.rows(rows, columns, empty="no service entry was found")
    contexts_.warn_incomplete(invocation, found)


@service.command(acts=("delete-service", "{id}"), examples=[("muster inform service delete ID", "")])
@click.argument("id")
@connection.options
@command.pass_invocation
def delete(invocation: command.Invocation, id: str, to: connection.ConnectionOptions) -> None:
    """Delete a service entry."""
    _in_services(invocation, to, lambda all_: all_.delete(id))
    invocation.printer.done({"id": id}, f"{id} is deleted")
