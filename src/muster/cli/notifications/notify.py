"""``muster notify``: send events to those they are meant for, and see who that is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection

if TYPE_CHECKING:
    from muster.bus import api
    from muster.notify import protocol
    from muster.predicates import types

LEAVE_S = 2.0
PARTICIPANT = "cli"  # as which a person sends and listens, unless another name is given

name_option = click.option(
    "--as", "name", default=PARTICIPANT, show_default=True, help="The name of the sender or receiver."
)


@click.group(
    cls=command.MusterGroup,
    examples=[
        ("muster notify send --to \"application = 'IIS' AND load > 0.8\" --event alert threat_level=4", ""),
        ('muster notify who "load > 0.8"', "who would be reached"),
    ],
)
def notify() -> None:
    """Send events to those they are meant for, and see who that is."""


def values_of(pairs: tuple[str, ...]) -> dict[str, types.Value]:
    """``threat_level=4 text='a b' services={docs,cgi}``: numbers, true, false, sets; all else is a string."""
    from muster.core import errors
    from muster.notify import documents

    found: dict[str, types.Value] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise errors.InvalidInput(f"{pair[:80]!r} is not NAME=VALUE", hint="for example threat_level=4")
        found[name] = documents.value(text)
    return found


def _sender(bus: api.Bus, given: str | None) -> str:
    """Whose event it would be."""
    from muster.core import errors

    if given is None:
        return f"{bus.identity}/{PARTICIPANT}"
    process, _, name = given.partition("/")
    if not process or not name:
        raise errors.InvalidInput(
            f"{given[:80]!r} is no sender: PROCESS/NAME", hint=f"for example {bus.identity}/{PARTICIPANT}"
        )
    return given


def _event(kind: str, pairs: tuple[str, ...], to: str, name: str, durable: bool) -> protocol.SendEvent:
    import secrets

    from muster.notify import protocol

    return protocol.SendEvent(
        id=secrets.token_hex(12),
        sender=name,
        type=kind,
        content=protocol.to_wire(values_of(pairs)),
        address=to,
        delivery="durable" if durable else "transient",
    )


@notify.command(
    acts=("notify", "{kind} to {address}"),
    examples=[
        ("muster notify send --to \"application = 'IIS'\" --event alert threat_level=4", ""),
        ("muster notify send --event command --durable action=restart", "kept until acknowledged"),
    ],
)
@click.option("--to", "address", default="TRUE", metavar="EXPR", help="Whom it is meant for (default: all).")
@click.option("--event", "kind", required=True, metavar="TYPE", help="The event's type.")
@click.option("--durable", is_flag=True, help="Keep it until each receiver has acknowledged it.")
@click.argument("content", nargs=-1, metavar="[NAME=VALUE]...")
@name_option
@connection.options
@command.pass_invocation
def send(
    invocation: command.Invocation,
    address: str,
    kind: str,
    durable: bool,
    content: tuple[str, ...],
    name: str,
    to: connection.ConnectionOptions,
) -> None:
    """Send an event.

    The event reaches a receiver if EXPR is true of its state, and its policy of the event and of the sender.
    """
    values = values_of(content)

    async def work() -> dict[str, Any]:
        from muster.notify import client

        async with await connection.connect(invocation, to) as bus, client.NotifyClient(bus) as mine:
            sent = await mine.send(name, kind, values, to=address, durable=durable, timeout_s=10.0)
            return {"id": sent, "type": kind, "sender": f"{bus.identity}/{name}", "durable": durable}

    told = command.run(work())
    invocation.printer.item(told, f"sent {kind} as {told['sender']} ({told['id']})")


@notify.command(
    examples=[
        (
            "muster notify listen --model WebServer --state load=0.9 --policy 'alert AND threat_level >= 4'",
            "",
        )
    ]
)
@click.option("--model", required=True, help="The model of this receiver's state.")
@click.option("--state", "state", multiple=True, metavar="NAME=VALUE", help="Its state; may be repeated.")
@click.option("--policy", required=True, metavar="EXPR", help="What it accepts, from whom.")
@click.option("--durable", is_flag=True, help="Durable events wait for this receiver while it is away.")
@click.option("-n", "--count", type=click.IntRange(1), help="End after so many events.")
@command.duration("--timeout", None, "How long to wait for each event.", may_be_zero=True)
@name_option
@connection.options
@command.pass_invocation
def listen(
    invocation: command.Invocation,
    model: str,
    state: tuple[str, ...],
    policy: str,
    durable: bool,
    count: int | None,
    timeout_s: float | None,
    name: str,
    to: connection.ConnectionOptions,
) -> None:
    """Be a receiver, and print the events that reach it."""
    values = values_of(state)

    async def work() -> None:
        import asyncio

        from muster.core import errors
        from muster.notify import client, protocol

        async with await connection.connect(invocation, to) as bus, client.NotifyClient(bus) as mine:
            me = await mine.advertise(name, model, values, policy=policy, durable=durable)
            invocation.printer.note(f"listening as {me.id}")
            seen = 0
            try:
                while count is None or seen < count:
                    event = await me.next(timeout_s=timeout_s)
                    seen += 1
                    record = {
                        "id": event.id,
                        "type": event.type,
                        "content": protocol.to_wire(event.content),
                        "sender": protocol.to_wire(event.sender),
                        "at_ms": event.at_ms,
                    }
                    line = f"{event.type} {_pairs(record['content'])} from {event.sender['_id']}"
                    invocation.printer.item(record, line)
                me.acknowledge()
            finally:
                if not durable:
                    # Whoever presses Ctrl-C does not wait for a domain that is gone.
                    with contextlib.suppress(TimeoutError, errors.Unavailable):
                        async with asyncio.timeout(LEAVE_S):
                            await me.leave()

    command.run(work())


@notify.command(
    acts=("leave", "{receiver}"),
    examples=[("muster notify leave web-1", "nothing is kept for it any more")],
)
@click.argument("receiver")
@connection.options
@command.pass_invocation
def leave(invocation: command.Invocation, receiver: str, to: connection.ConnectionOptions) -> None:
    """End a receiver of yours whose process is gone, and throw away what waits for it.

    A durable one stays until it is ended; so does any whose process was killed.
    """

    async def ask(bus: api.Bus) -> str:
        from muster.core import errors
        from muster.notify import client, protocol, queries

        name = receiver.removeprefix(f"{bus.identity}/")
        full = protocol.participant_id(bus.identity, name)
        if full not in [
            one["receiver"] for one in (await queries.list_receivers(bus, prefix=full)).receivers
        ]:
            raise errors.NotFound(f"there is no receiver {full[:160]}", hint="see `muster notify receivers`")
        async with client.NotifyClient(bus) as mine:
            await mine.change([protocol.LeaveReceiver(receiver=name)])
        return full

    left = command.run(_with(invocation, to, ask))
    invocation.printer.done({"receiver": left}, f"there is no receiver {left} any more")


def format_time(seconds: float) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _grant(grant: dict[str, Any]) -> str:
    where = ", ".join(f"{key} {value}" for key, value in grant.get("within", {}).items() if value)
    return (
        f"{grant['name']} = {grant['value']!r}, granted by {grant['by']} (tier {grant['tier']}) "
        f"from {format_time(grant['since'])} until {format_time(grant['until'])}"
    ) + (f", within {where}" if where else "")


def _pairs(values: Any, between: str = " ") -> str:
    return between.join(f"{name}={_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    """As one would write it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return "{" + ", ".join(value) + "}" if isinstance(value, list | tuple) else str(value)


async def _with(invocation: command.Invocation, to: connection.ConnectionOptions, question: Any) -> Any:
    async with await connection.connect(invocation, to) as bus:
        return await question(bus)


@notify.command(examples=[('muster notify receivers --where "load > 0.8"', "")])
@click.option("--where", default="", metavar="EXPR", help="Only those of whom this is true.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many.")
@connection.options
@command.pass_invocation
def receivers(
    invocation: command.Invocation, where: str, limit: int, to: connection.ConnectionOptions
) -> None:
    """List receivers with their states and policies."""

    async def ask(bus: api.Bus) -> Any:
        from muster.notify import queries

        return await queries.list_receivers(bus, where=where, limit=limit)

    found = command.run(_with(invocation, to, ask))
    listed = found.receivers
    if invocation.printer.for_people:
        listed = [{**one, "state": _pairs(one["state"], ", ")} for one in listed]
    columns = ["receiver", "model", "state", "policy", "delivery"]
    invocation.printer.rows(
        listed, columns, empty="no such receiver is there" if where else "no receiver is there"
    )
    if found.count > len(found.receivers):
        invocation.printer.note(f"{len(found.receivers)} of {found.count}")


@notify.command(examples=[('muster notify who "load > 0.8" --event alert threat_level=4', "")])
@click.argument("expression", metavar="EXPR")
@click.argument("content", nargs=-1, metavar="[NAME=VALUE]...")
@click.option("--event", "kind", metavar="TYPE", help="Only those who would accept this event.")
@click.option("--from", "sender", metavar="PROCESS/NAME", help="…from this sender (default: yourself).")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Show so many.")
@connection.options
@command.pass_invocation
def who(
    invocation: command.Invocation,
    expression: str,
    content: tuple[str, ...],
    kind: str | None,
    sender: str | None,
    limit: int,
    to: connection.ConnectionOptions,
) -> None:
    """Say who would be reached, how many, and why the near misses would not."""
    from muster.core import errors

    if kind is None and (content or sender):
        raise errors.InvalidInput(
            "content and --from are of an event: which one?", hint="name its type with --event"
        )

    async def ask(bus: api.Bus) -> Any:
        from muster.notify import queries

        by = _sender(bus, sender)
        event = _event(kind, content, expression, by.partition("/")[2], False) if kind else None
        return await queries.match_receivers(bus, expression, event=event, sender=by, limit=limit)

    found = command.run(_with(invocation, to, ask))
    printer = invocation.printer
    told = {
        "count": found.count,
        "receivers": [one["receiver"] for one in found.receivers],
        "near": found.near,
    }
    if not printer.for_people:
        printer.item(told, "")
        return
    printer.item(told, f"{found.count} would be reached" + (":" if found.receivers else ""))
    for name in told["receivers"]:
        printer.item({}, f"  {name}")
    for miss in found.near:
        printer.item({}, f"near miss: {miss['receiver']}: {'; '.join(miss['why'])}")


@notify.command(
    examples=[("muster notify explain 'alert threat_level=3' farm/web-1 --to \"load > 0.8\"", "")]
)
@click.argument("event", metavar="EVENT")
@click.argument("receiver")
@click.option("--to", "address", default="TRUE", metavar="EXPR", help="The event's address.")
@click.option("--from", "sender", metavar="PROCESS/NAME", help="Its sender (default: yourself).")
@connection.options
@command.pass_invocation
def explain(
    invocation: command.Invocation,
    event: str,
    receiver: str,
    address: str,
    sender: str | None,
    to: connection.ConnectionOptions,
) -> None:
    """Say why an event would reach a receiver, or which side keeps it away.

    EVENT is its type and content in one word: 'alert threat_level=4'. RECEIVER is PROCESS/NAME.
    """
    import shlex

    from muster.core import errors

    try:
        words = shlex.split(event)
    except ValueError as error:
        raise errors.InvalidInput(f"{event[:80]!r}: {str(error).lower()}") from None
    if not words:
        raise errors.InvalidInput("an event has a type", hint="for example 'alert threat_level=4'")

    async def ask(bus: api.Bus) -> Any:
        from muster.notify import queries

        by = _sender(bus, sender)
        sent = _event(words[0], tuple(words[1:]), address, by.partition("/")[2], False)
        return await queries.explain(bus, sent, sender=by, receiver=receiver)

    told = command.run(_with(invocation, to, ask))
    lines = ["it is delivered" if told["delivered"] else "it is not delivered"]
    for side in ("address", "event", "sender"):
        found = told[side]
        lines.append(f"  {side}: {'holds' if found['holds'] else 'fails'}")
        lines += [f"    {why}" for why in found["because"]]
    for whose in ("granted", "receiver_granted"):
        lines += [
            f"  {'the receiver has ' if whose == 'receiver_granted' else ''}{_grant(grant)}"
            for grant in told[whose].values()
        ]
    if told.get("since_ms"):
        lines.append(f"  the receiver's state is as it is since {format_time(told['since_ms'] / 1000)}")
    invocation.printer.item(told, "\n".join(lines))


@notify.command(examples=[("muster notify check 'alert AND threat_level >= 4'", "")])
@click.argument("policy")
@connection.options
@command.pass_invocation
def check(invocation: command.Invocation, policy: str, to: connection.ConnectionOptions) -> None:
    """Type a policy against the domain's models, and say what it costs."""

    async def ask(bus: api.Bus) -> Any:
        from muster.notify import queries

        return await queries.check(bus, policy)

    told = command.run(_with(invocation, to, ask))
    invocation.printer.item(
        told,
        f"{told['canonical']}\n  {told['clauses']} clauses, cost {told['cost']}, "
        + (f"indexed as {told['conjunctions']}" if told["indexed"] else "asked one by one"),
    )


@notify.command(
    examples=[("muster notify define web.yaml", "models in YAML, JSON, notation or XML")],
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@connection.options
@command.pass_invocation
def define(invocation: command.Invocation, file: Path, to: connection.ConnectionOptions) -> None:
    """Make models of receivers and events known to the domain.

    Policies in the file are checked against them.
    """
    from muster.notify import documents

    document = documents.read(file.read_bytes())

    async def ask(bus: api.Bus) -> Any:
        from muster.notify import client, queries

        async with client.NotifyClient(bus) as mine:
            for model in document.models:
                await mine.define(model)
        for policy in document.policies.values():
            await queries.check(bus, policy)

    command.run(_with(invocation, to, ask))
    invocation.printer.rows(
        [{"model": model.name, "of": model.kind.value} for model in document.models], ["model", "of"]
    )


@notify.command(
    examples=[("muster notify models", ""), ("muster notify models --form xml", "as a document of this form")]
)
@click.option(
    "--form",
    type=click.Choice(["yaml", "json", "notation", "xml"]),
    help="Write them as a document that `define` reads.",
)
@connection.options
@command.pass_invocation
def models(invocation: command.Invocation, form: Any, to: connection.ConnectionOptions) -> None:
    """List the models of receivers and events."""

    async def ask(bus: api.Bus) -> Any:
        from muster.notify import queries

        return await queries.defined(bus)

    found = command.run(_with(invocation, to, ask))
    if form is None:
        invocation.printer.rows(found, ["name", "of", "attributes"], empty="no model is defined")
        return
    import msgspec

    from muster.notify import authorities, documents, protocol

    listed = (authorities.model_of(msgspec.convert(one, protocol.DefineModel)) for one in found)
    click.echo(documents.write(documents.NotifyDocument(tuple(listed)), form), nl=False)
