"""``muster notify``: send events to receivers selected by their state, and query receivers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection, live_names, tables
from muster.cli.notifications import authority
from muster.notify import operations

if TYPE_CHECKING:
    from muster.bus import api
    from muster.notify import protocol, rows
    from muster.predicates import types


LEAVE_S = 2.0
GRANT_S = 30 * 86_400.0
PARTICIPANT = "cli"  # the default name of a sender or receiver

name_option = click.option(
    "--as",
    "name",
    metavar="NAME",
    default=PARTICIPANT,
    show_default=True,
    help="Name of the sender or receiver.",
)


@click.group(
    cls=command.MusterGroup,
    examples=[
        ("muster notify send --to \"application = 'IIS' AND load > 0.8\" --event alert threat_level=4", ""),
        ('muster notify who "load > 0.8"', "the receivers an event would reach"),
    ],
)
def notify() -> None:
    """Send events to receivers selected by state; query receivers."""


def values_of(pairs: tuple[str, ...]) -> dict[str, types.Value]:
    """Parse ``threat_level=4 text='a b' services={docs,cgi}``: numbers, booleans, sets and strings."""
    from muster.notify import documents

    return {name: documents.value(text) for name, text in command.assignments(pairs).items()}


def _sender(bus: api.Bus, sender: str | None) -> str:
    """The full ID of the sender."""
    from muster.core import errors

    if sender is None:
        return f"{bus.identity}/{PARTICIPANT}"
    process, _, name = sender.partition("/")
    if not process or not name:
        raise errors.InvalidInput(
            f"{sender[:80]!r} is not a sender: write PROCESS/NAME",
            hint=f"for example {bus.identity}/{PARTICIPANT}",
        )
    return sender


async def _event(bus: api.Bus, kind: str, pairs: tuple[str, ...], to: str, sender: str) -> protocol.SendEvent:
    """An event to be explained, not sent."""
    import secrets

    from muster.notify import client, protocol

    (await client.vocabulary_of(bus)).require_type(kind)
    return protocol.SendEvent(
        id=secrets.token_hex(12),
        sender=sender.partition("/")[2],
        type=kind,
        content=protocol.to_wire(values_of(pairs)),
        address=to,
    )


@notify.command(
    acts=("notify", "{kind} to {address}"),
    examples=[
        ("muster notify send --to \"application = 'IIS'\" --event alert threat_level=4", ""),
        ("muster notify send --event command --durable action=restart", "stored until acknowledged"),
    ],
)
@click.option(
    "--to",
    "address",
    default="TRUE",
    metavar="PREDICATE",
    help="Predicate over receivers' states (default: all receivers).",
)
@click.option("--event", "kind", required=True, metavar="TYPE", help="The event's type.")
@click.option("--durable", is_flag=True, help="Store the event until each receiver has acknowledged it.")
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

    A receiver gets the event if its state matches PREDICATE and its policy accepts the event and the sender.
    """
    values = values_of(content)

    async def work() -> dict[str, Any]:
        from muster.notify import client

        async with await connection.connect(invocation, to) as bus, client.NotifyClient(bus) as mine:
            sent = await mine.send(
                name, kind, values, to=address, durable=durable, defined=True, timeout_s=10.0
            )
            return {"id": sent, "type": kind, "sender": f"{bus.identity}/{name}", "durable": durable}

    sent = command.run(work())
    invocation.printer.item(sent, f"sent {kind} as {sent['sender']} ({sent['id']})")


@notify.command(
    examples=[
        (
            "muster notify listen --model WebServer --state load=0.9 --policy 'alert AND threat_level >= 4'",
            "",
        )
    ]
)
@click.option(
    "--model",
    metavar="NAME",
    required=True,
    help="Model of the receiver's state.",
    shell_complete=live_names.MODELS,
)
@click.option(
    "--state", "state", multiple=True, metavar="NAME=VALUE", help="A value of its state; may be repeated."
)
@click.option(
    "--policy", required=True, metavar="PREDICATE", help="Which events it accepts, from which senders."
)
@click.option("--durable", is_flag=True, help="Store durable events while the receiver is disconnected.")
@click.option("-n", "--count", type=command.CountParam(1), help="Stop after this number of events.")
@command.duration("--timeout", None, "Time limit for each event.", may_be_zero=True)
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
    """Register a receiver and print its events."""
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
                    # After Ctrl-C do not wait for a domain that is unavailable.
                    with contextlib.suppress(TimeoutError, errors.Unavailable):
                        async with asyncio.timeout(LEAVE_S):
                            await me.leave()

    command.run(work())


@notify.command(
    acts=("leave", "{receiver}"),
    examples=[("muster notify leave web-1", "its stored events are discarded")],
)
@click.argument("receiver", shell_complete=live_names.RECEIVERS)
@connection.options
@command.pass_invocation
def leave(invocation: command.Invocation, receiver: str, to: connection.ConnectionOptions) -> None:
    """Remove one of your receivers and discard its stored events.

    Durable receivers, and receivers whose process was killed, stay registered until they are removed.
    """

    async def ask(bus: api.Bus) -> str:
        from muster.core import errors
        from muster.notify import client, protocol, queries

        name = receiver.removeprefix(f"{bus.identity}/")
        full = protocol.participant_id(bus.identity, name)
        listed = await queries.list_receivers(bus, prefix=full)
        if full not in [known.receiver for known in listed.receivers]:
            raise errors.NotFound(f"there is no receiver {full[:160]}", hint="see `muster notify receivers`")
        async with client.NotifyClient(bus) as mine:
            await mine.change([protocol.LeaveReceiver(receiver=name)])
        return full

    left = connection.call(invocation, to, ask)
    invocation.printer.done({"receiver": left}, f"the receiver {left} was removed")


def _grant(grant: rows.HeldGrant) -> str:
    where = ", ".join(f"{key} {value}" for key, value in grant.within.items() if value)
    return (
        f"{grant.name} = {grant.value!r}, granted by {grant.by} (tier {grant.tier}) "
        f"from {tables.utc(grant.since)} until {tables.utc(grant.until)}"
    ) + (f", within {where}" if where else "")


def _pairs(values: Any, between: str = " ") -> str:
    return between.join(f"{name}={_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    """The notation of the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return "{" + ", ".join(value) + "}" if isinstance(value, list | tuple) else str(value)


@notify.command(examples=[('muster notify receivers --where "load > 0.8"', "")])
@click.option(
    "--where", default="", metavar="PREDICATE", help="Only receivers whose state matches this predicate."
)
@command.limit(100, "Maximum number of receivers.")
@connection.options
@command.pass_invocation
def receivers(
    invocation: command.Invocation, where: str, limit: int, to: connection.ConnectionOptions
) -> None:
    """List receivers with their states and policies."""

    async def ask(bus: api.Bus) -> rows.ReceiverList:
        from muster.notify import queries

        return await queries.list_receivers(bus, where=where, limit=limit)

    result = connection.call(invocation, to, ask)
    invocation.printer.rows(
        result.receivers,
        operations.RECEIVERS.columns,
        empty="no receiver matches" if where else "there are no receivers",
    )
    if result.count > len(result.receivers):
        invocation.printer.note(f"{len(result.receivers)} of {result.count}")


@notify.command(examples=[('muster notify who "load > 0.8" --event alert threat_level=4', "")])
@click.argument("expression", metavar="PREDICATE")
@click.argument("content", nargs=-1, metavar="[NAME=VALUE]...")
@click.option(
    "--event", "kind", metavar="TYPE", help="Only receivers that would accept an event of this type."
)
@click.option("--from", "sender", metavar="PROCESS/NAME", help="Sender of the event (default: yourself).")
@command.limit(20, "Maximum number of receivers.")
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
    """Show which receivers would be reached, and why near misses would not."""
    from muster.core import errors

    if kind is None and (content or sender):
        raise errors.InvalidInput("content and --from require an event type", hint="add --event TYPE")

    async def ask(bus: api.Bus) -> rows.ReceiverMatches:
        from muster.notify import queries

        by = _sender(bus, sender)
        event = await _event(bus, kind, content, expression, by) if kind else None
        return await queries.match_receivers(bus, expression, event=event, sender=by, limit=limit)

    result = connection.call(invocation, to, ask)
    printer = invocation.printer
    lines = [
        f"matching receivers: {result.count}",
        *(f"  {name}" for name in result.receivers),
        *(f"near miss: {miss.receiver}: {'; '.join(miss.why)}" for miss in result.near),
    ]
    printer.item(result, "\n".join(lines))


@notify.command(
    examples=[("muster notify explain 'alert threat_level=3' farm/web-1 --to \"load > 0.8\"", "")]
)
@click.argument("event", metavar="EVENT")
@click.argument("receiver", shell_complete=live_names.RECEIVERS)
@click.option("--to", "address", default="TRUE", metavar="PREDICATE", help="The event's address.")
@click.option("--from", "sender", metavar="PROCESS/NAME", help="Sender of the event (default: yourself).")
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
    """Explain why an event would or would not reach a receiver.

    EVENT is its type and content in one argument: 'alert threat_level=4'. RECEIVER is PROCESS/NAME.
    """
    import shlex

    from muster.core import errors

    try:
        words = shlex.split(event)
    except ValueError as error:
        raise errors.InvalidInput(f"{event[:80]!r}: {str(error).lower()}") from None
    if not words:
        raise errors.InvalidInput(
            "the type of the event is missing", hint="for example 'alert threat_level=4'"
        )

    async def ask(bus: api.Bus) -> rows.DeliveryExplanation:
        from muster.notify import queries

        by = _sender(bus, sender)
        sent = await _event(bus, words[0], tuple(words[1:]), address, by)
        return await queries.explain(bus, sent, sender=by, receiver=receiver)

    explanation = connection.call(invocation, to, ask)
    lines = ["delivered" if explanation.delivered else "not delivered"]
    sides = {"address": explanation.address, "event": explanation.event, "sender": explanation.sender}
    for side, verdict in sides.items():
        lines.append(f"  {side}: {'holds' if verdict.holds else 'fails'}")
        lines += [f"    {why}" for why in verdict.because]
    lines += [f"  {_grant(grant)}" for grant in explanation.granted.values()]
    lines += [f"  the receiver has {_grant(grant)}" for grant in explanation.receiver_granted.values()]
    if explanation.since_ms:
        lines.append(f"  the receiver's state is unchanged since {tables.utc(explanation.since_ms / 1000)}")
    invocation.printer.item(explanation, "\n".join(lines))


@notify.command(examples=[("muster notify check 'alert AND threat_level >= 4'", "")])
@click.argument("policy")
@connection.options
@command.pass_invocation
def check(invocation: command.Invocation, policy: str, to: connection.ConnectionOptions) -> None:
    """Check a policy against the domain's models and show its cost."""

    async def ask(bus: api.Bus) -> rows.PolicyCheck:
        from muster.notify import queries

        return await queries.check(bus, policy)

    checked = connection.call(invocation, to, ask)
    invocation.printer.item(
        checked,
        f"{checked.canonical}\n  {checked.clauses} clauses, cost {checked.cost}, "
        + (f"indexed as {checked.conjunctions}" if checked.indexed else "not indexed"),
    )


@notify.command(
    examples=[
        ("muster notify define web.yaml", "in YAML, JSON, notation or XML"),
        ("muster notify define state.txt --as web-1", "a state that does not say whose it is"),
    ],
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--as", "name", default="", metavar="NAME", help="Receiver whose state or policy has no name.")
@authority.by_option
@connection.options
@command.pass_invocation
def define(
    invocation: command.Invocation, file: Path, name: str, by: Path | None, to: connection.ConnectionOptions
) -> None:
    """Define models of receivers and events, and create receivers with their states and policies.

    The receivers are yours and durable: their events are stored until `muster notify listen --durable`
    receives them, or `muster notify leave` removes the receiver. A policy without a state changes the policy
    of an existing receiver of yours. Restricted attributes, whose names begin with an underscore, are granted
    by the authority for 30 days.
    """
    import time

    from muster.core import errors
    from muster.notify import authorities, documents, models, protocol
    from muster.trust import documents as trust_documents

    document = documents.read(file.read_bytes())
    if name or document.states or "" in document.policies:
        document = document.named(name)
    needs_grants = any(state.granted for state in document.states)
    signer = authority.signer(invocation, by) if needs_grants else None

    async def ask(bus: api.Bus) -> list[dict[str, str]]:
        from muster.notify import client, queries

        vocabulary = models.Vocabulary()
        for row in await queries.list_models(bus):
            vocabulary.add(authorities.model_of(row))
        for model in document.models:
            vocabulary.add(model)
        for policy in document.policies.values():
            vocabulary.policy_text(policy)
        for state in document.states:
            if (its_model := vocabulary.receivers.get(state.model)) is None:
                raise errors.NotFound(f"there is no model {state.model!r} of receivers")
            its_model.require(state.own)
            its_model.require_granted(state.granted)
        changed = document.policies.keys() - {state.receiver for state in document.states}
        for receiver in sorted(changed):
            full = protocol.participant_id(bus.identity, receiver)
            listed = await queries.list_receivers(bus, prefix=full, limit=1)
            if full not in [known.receiver for known in listed.receivers]:
                raise errors.NotFound(
                    f"the policy {receiver!r} is of no receiver: {full} does not exist",
                    hint="a policy has the name of its receiver: add `state NAME = MODEL {…}`",
                )
        rows = [{"name": model.name, "kind": f"model of {model.kind.value}s"} for model in document.models]
        async with client.NotifyClient(bus) as mine:
            for model in document.models:
                await mine.define(model)
            for state in document.states:
                if signer is not None and state.granted:
                    scope = trust_documents.GrantScope(prefix=state.receiver)
                    granted: Any = protocol.to_wire(state.granted)
                    chain = signer.grant(
                        bus.identity, granted, tier=1, now=time.time(), lifetime_s=GRANT_S, scope=scope
                    )
                    await mine.present(chain)
                    rows.append({"name": state.receiver, "kind": f"grant of {', '.join(granted)}"})
            for state in document.states:
                policy = document.policies.get(state.receiver, "")
                await mine.advertise(state.receiver, state.model, state.own, policy=policy, durable=True)
                rows.append({"name": state.receiver, "kind": f"receiver with {state.model}"})
            for receiver in sorted(changed):
                await mine.sender(receiver).policy(document.policies[receiver])
                rows.append({"name": receiver, "kind": "policy"})
        if not rows:
            raise errors.InvalidInput("the document defines nothing")
        return rows

    invocation.printer.rows(connection.call(invocation, to, ask), ["name", "kind"])


@notify.command(
    examples=[("muster notify models", ""), ("muster notify models --form xml", "as an XML document")]
)
@click.option(
    "--form",
    type=click.Choice(["yaml", "json", "notation", "xml"]),
    help="Print a document in this format, which `define` reads.",
)
@connection.options
@command.pass_invocation
def models(invocation: command.Invocation, form: Any, to: connection.ConnectionOptions) -> None:
    """List the models of receivers and events."""

    async def ask(bus: api.Bus) -> list[rows.ModelRow]:
        from muster.notify import queries

        return await queries.list_models(bus)

    definitions = connection.call(invocation, to, ask)
    if form is None:
        invocation.printer.rows(definitions, operations.MODELS.columns, empty="no model is defined")
        return
    from muster.notify import authorities, documents

    listed = tuple(map(authorities.model_of, definitions))
    click.echo(documents.write(documents.NotifyDocument(listed), form), nl=False)
