"""``muster message``: JMS messages by hand, and the care of queues and subscriptions."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection

if TYPE_CHECKING:
    from muster.message import destinations, messages
    from muster.message.client import api

_MESSAGE = ("id", "type", "priority", "redelivered", "properties", "body")
_QUEUES = (
    "queue",
    "depth",
    "in_a_second",
    "out_a_second",
    "consumers",
    "in_flight",
    "delivered",
    "matched",
    "rejected",
    "expired",
)
_SUBSCRIPTIONS = (
    "subscription",
    "identity",
    "client_id",
    "topic",
    "selector",
    "consumers",
    "waiting",
    "behind",
    "delivered",
    "matched",
    "rejected",
)

_selector = click.option("--where", "selector", metavar="SELECTOR", help="Only what this selector accepts.")


@click.group(
    cls=command.MusterGroup,
    examples=[("muster message send queue:orders 'four chairs'", ""), ("muster message queues", "")],
)
def message() -> None:
    """Send, receive and browse JMS messages; see to queues."""


def _with(
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


def _record(found: messages.JmsMessage) -> dict[str, Any]:
    body = found.body()
    return {
        "id": found.message_id,
        "type": type(found).__name__,
        "destination": str(found.destination) if found.destination else None,
        "correlation_id": found.correlation_id,
        "reply_to": str(found.reply_to) if found.reply_to else None,
        "priority": found.priority,
        "persistent": found.persistent,
        "redelivered": found.redelivered,
        "timestamp_ms": found.timestamp_ms,
        "expiration_ms": found.expiration_ms,
        "properties": dict(found.properties),
        "body": base64.b64encode(body).decode() if isinstance(body, bytes) else body,
    }


def _destination(text: str) -> destinations.Destination:
    """By its kind: a queue with a slip in it would be a topic to which nobody listens."""
    from muster.message import destinations

    if not text.startswith(("queue:", "topic:", "temporary-queue:", "temporary-topic:")):
        raise click.BadParameter(f"{text!r} is neither queue:NAME nor topic:NAME", param_hint="DESTINATION")
    return destinations.Destination.parse(text)


def _property(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--property")
    if value in ("true", "false"):
        return name, value == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


@message.command(
    examples=[
        ("muster message send queue:orders 'four chairs' -p amount=4", ""),
        ("muster message send topic:news/sport won --ttl 1m --priority 9", ""),
    ]
)
@click.argument("destination")
@click.argument("body")
@click.option("-p", "--property", "properties", multiple=True, metavar="NAME=VALUE", help="May be repeated.")
@click.option("--priority", type=click.IntRange(0, 9), default=4, show_default=True, help="9 is the highest.")
@command.duration("--ttl", "0", "Expires after so long.", may_be_zero=True)
@command.duration("--delay", "0", "Delivered no earlier than after so long.", may_be_zero=True)
@click.option("--non-persistent", is_flag=True, help="May be lost; quicker.")
@connection.options
@command.pass_invocation
def send(
    invocation: command.Invocation,
    destination: str,
    body: str,
    properties: tuple[str, ...],
    priority: int,
    ttl_s: float,
    delay_s: float,
    non_persistent: bool,
    to: connection.ConnectionOptions,
) -> None:
    """Send a text message.

    DESTINATION is queue:NAME or topic:NAME.
    """
    from muster.message import messages

    where = _destination(destination)
    made = messages.TextMessage(body, properties=dict(map(_property, properties)))

    async def work(connected: api.Connection) -> None:
        producer = connected.session().producer(
            where,
            persistent=not non_persistent,
            priority=priority,
            ttl_s=ttl_s,
            delay_s=delay_s,
        )
        await producer.send(made)

    _with(invocation, to, work)
    invocation.printer.done(_record(made), f"sent {made.message_id} to {destination}")


@message.command(
    examples=[
        ("muster message receive queue:orders --where 'amount > 3'", ""),
        ("muster message receive topic:news/sport --durable all --client-id desk", "none is missed"),
    ]
)
@click.argument("destination")
@_selector
@click.option("-n", "--count", type=click.IntRange(1), default=1, show_default=True, help="How many.")
@command.duration(
    "--timeout", None, "Stop after so long without one; 0: take what is there.", may_be_zero=True
)
@click.option("--durable", metavar="NAME", help="By the durable subscription of this name.")
@click.option("--client-id", help="Whose durable subscription it is.")
@connection.options
@command.pass_invocation
def receive(
    invocation: command.Invocation,
    destination: str,
    selector: str | None,
    count: int,
    timeout_s: float | None,
    durable: str | None,
    client_id: str | None,
    to: connection.ConnectionOptions,
) -> None:
    """Receive and acknowledge messages.

    Exit code 5 if --timeout passes first.
    """
    from muster.core import errors
    from muster.message.client import api

    where = _destination(destination)

    async def work(connected: api.Connection) -> None:
        session = connected.session(api.AcknowledgeMode.CLIENT)
        if durable is None:
            consumer = await session.consumer(where, selector, prefetch=count)
        elif client_id is None:
            consumer = await session.shared_durable_consumer(where, durable, selector, prefetch=count)
        else:
            consumer = await session.durable_consumer(where, durable, selector, prefetch=count)
        for number in range(count):
            found = await (consumer.receive_nowait() if timeout_s == 0 else consumer.receive(timeout_s))
            if found is None:
                raise errors.TimedOut(f"only {number} of {count} messages came from {destination}")
            record = _record(found)
            invocation.printer.item(record, str(record["body"]))
            await found.acknowledge()

    _with(invocation, to, work, client_id)


@message.command(examples=[("muster message browse orders --where \"region = 'north'\"", "")])
@click.argument("queue")
@_selector
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="The most to show.")
@connection.options
@command.pass_invocation
def browse(
    invocation: command.Invocation,
    queue: str,
    selector: str | None,
    limit: int,
    to: connection.ConnectionOptions,
) -> None:
    """Show what waits in a queue, and take nothing."""
    found = _browse(invocation, queue, selector, limit, to)
    empty = f"nothing in the queue {queue} is selected" if selector else f"the queue {queue} is empty"
    invocation.printer.rows(found, _MESSAGE, empty=empty)


def _browse(
    invocation: command.Invocation,
    queue: str,
    selector: str | None,
    limit: int,
    to: connection.ConnectionOptions,
) -> list[dict[str, Any]]:
    from muster.message import destinations

    async def work(connected: api.Connection) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async for one in connected.session().browse(destinations.queue(queue), selector):
            found.append(_record(one))
            if len(found) == limit:
                break
        return found

    rows: list[dict[str, Any]] = _with(invocation, to, work)
    return rows


@message.command(examples=[("muster message queues", "depths, consumers and what was rejected")])
@connection.options
@command.pass_invocation
def queues(invocation: command.Invocation, to: connection.ConnectionOptions) -> None:
    """List the queues."""
    from muster.message import protocol

    found = _with(invocation, to, lambda connected: connected.request(protocol.ListQueues()))
    invocation.printer.rows(found.rows, _QUEUES, empty="there are no queues")


@message.command(examples=[("muster message subscriptions", "")])
@connection.options
@command.pass_invocation
def subscriptions(invocation: command.Invocation, to: connection.ConnectionOptions) -> None:
    """List the durable subscriptions."""
    from muster.message import protocol

    found = _with(invocation, to, lambda connected: connected.request(protocol.ListSubscriptions()))
    invocation.printer.rows(found.rows, _SUBSCRIPTIONS, empty="there are no durable subscriptions")


@message.command(
    acts=("unsubscribe", "subscription:{name}"),
    examples=[("muster message unsubscribe all --client-id desk", "nothing is kept for it any more")],
)
@click.argument("name")
@click.option("--client-id", help="Whose it is (default: one that clients without an id share).")
@click.option("--identity", help="Of which identity the client is (default: one's own); for operators.")
@connection.options
@command.pass_invocation
def unsubscribe(
    invocation: command.Invocation,
    name: str,
    client_id: str | None,
    identity: str | None,
    to: connection.ConnectionOptions,
) -> None:
    """End a durable subscription, and throw away what waits for it.

    Refused while it is in use.
    """
    from muster.message import protocol

    if identity is not None and client_id is None:
        raise click.UsageError("--identity needs --client-id: subscriptions without one are common to all")

    async def work(connected: api.Connection) -> None:
        of = (identity or connected.bus.identity, client_id) if client_id is not None else None
        await connected.request(protocol.EndSubscription(connected.name, name, owner=of))

    _with(invocation, to, work)
    invocation.printer.done(
        {"subscription": name, "client_id": client_id, "identity": identity},
        f"there is no subscription {name} any more",
    )


@message.command(
    examples=[("muster message purge orders --where \"region = 'north'\"", "")],
)
@click.argument("queue")
@_selector
@connection.options
@command.pass_invocation
def purge(
    invocation: command.Invocation, queue: str, selector: str | None, to: connection.ConnectionOptions
) -> None:
    """Throw away what waits in a queue."""
    from muster.message import protocol

    found = _with(invocation, to, lambda connected: connected.request(protocol.PurgeQueue(queue, selector)))
    invocation.printer.done({"queue": queue, "purged": found.count}, f"purged {found.count} from {queue}")


@message.command("dead-letters", examples=[("muster message dead-letters", "with the reason of each")])
@_selector
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="The most to show.")
@connection.options
@command.pass_invocation
def dead_letters(
    invocation: command.Invocation, selector: str | None, limit: int, to: connection.ConnectionOptions
) -> None:
    """Show the messages that could not be delivered, and why."""
    from muster.message import destinations
    from muster.message.dispatcher import delivery

    rows = _browse(invocation, destinations.DEAD_LETTERS, selector, limit, to)
    for row in rows:
        row["reason"] = row["properties"].get(delivery.REASON)
        row["from"] = row["properties"].get(delivery.FROM)
    invocation.printer.rows(rows, ("id", "from", "reason", "body"), empty="there are no dead letters")


@message.command(
    examples=[
        ("muster message move dead-letters", "each back to where it came from"),
        ("muster message move orders --to queue:later --where 'amount > 100'", ""),
    ],
)
@click.argument("queue")
@click.option("--to", "target", metavar="DESTINATION", help="Where to (default: where each came from).")
@_selector
@click.option("--limit", type=click.IntRange(1), default=1000, show_default=True, help="The most to move.")
@connection.options
@command.pass_invocation
def move(
    invocation: command.Invocation,
    queue: str,
    target: str | None,
    selector: str | None,
    limit: int,
    to: connection.ConnectionOptions,
) -> None:
    """Move what waits in a queue to another destination."""
    from muster.message import protocol

    if target is not None:
        _destination(target)
    asked = protocol.MoveMessages(queue, target, selector, limit)
    found = _with(invocation, to, lambda connected: connected.request(asked))
    invocation.printer.done({"queue": queue, "moved": found.count}, f"moved {found.count} from {queue}")
