"""``muster message``: JMS messages, queues and subscriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from muster.cli import command, connection, live_names
from muster.cli.messages import common, datagrams
from muster.core import units

if TYPE_CHECKING:
    from muster.message import rows
    from muster.message.client import api

QUIET_S = 1.0  # `receive` then says that it waits
NUMBER_DIGITS = 19  # fewer fit into the number of a message

_queue = click.argument(
    "queue",
    shell_complete=live_names.QUEUES,
    callback=lambda _, __, name: name.removeprefix("queue:"),  # as other commands name destinations
)


@click.group(
    cls=command.MusterGroup,
    examples=[("muster message send queue:orders 'four chairs'", ""), ("muster message queues", "")],
)
def message() -> None:
    """Send, receive and browse JMS messages; administer queues."""


message.add_command(datagrams.udp)


@message.command(
    examples=[
        ("muster message send queue:orders 'four chairs' -p amount=4", ""),
        ("muster message send topic:news/sport won --ttl 1m --priority 9", ""),
    ]
)
@click.argument("destination", shell_complete=live_names.DESTINATIONS)
@click.argument("body")
@common.properties
@click.option(
    "--priority",
    type=command.CountParam(0, 9),
    default=4,
    show_default=True,
    help="Priority; 9 is the highest.",
)
@command.duration("--ttl", "0", "Time to live.", may_be_zero=True)
@command.duration("--delay", "0", "Minimum delay of the delivery.", may_be_zero=True)
@click.option(
    "--non-persistent", is_flag=True, help="Send without storing: faster, but the message may be lost."
)
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
    from muster.message import messages, rows

    where = common.destination(destination)
    made = messages.TextMessage(body, properties=common.properties_of(properties))

    async def work(connected: api.Connection) -> None:
        producer = connected.session().producer(
            where,
            persistent=not non_persistent,
            priority=priority,
            ttl_s=ttl_s,
            delay_s=delay_s,
        )
        await producer.send(made)

    common.with_connection(invocation, to, work)
    invocation.printer.done(rows.message_row(made), f"sent {made.message_id} to {destination}")


@message.command(
    examples=[
        ("muster message receive queue:orders --where 'amount > 3'", ""),
        (
            "muster message receive topic:news/sport --durable all --client-id office",
            "a durable subscription",
        ),
    ]
)
@click.argument("destination", shell_complete=live_names.DESTINATIONS)
@common.selector
@click.option(
    "-n", "--count", type=command.CountParam(1), default=1, show_default=True, help="Number of messages."
)
@command.duration(
    "--timeout",
    None,
    "Stop after this time without a message; 0: receive only waiting messages.",
    may_be_zero=True,
)
@click.option("--durable", metavar="NAME", help="Use the durable subscription of this name.")
@click.option("--client-id", metavar="ID", help="Client ID of the durable subscription.")
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
    from muster.core.formats import complete
    from muster.message import rows
    from muster.message.client import api

    where = common.destination(destination)

    async def work(connected: api.Connection) -> None:
        session = connected.session(api.AcknowledgeMode.CLIENT)
        ahead = min(count, api.PREFETCH)
        if durable is None:
            consumer = await session.consumer(where, selector, prefetch=ahead)
        elif client_id is None:
            consumer = await session.shared_durable_consumer(where, durable, selector, prefetch=ahead)
        else:
            consumer = await session.durable_consumer(where, durable, selector, prefetch=ahead)
        for number in range(count):
            if timeout_s is None:
                received = await consumer.receive(QUIET_S)
                if received is None:
                    invocation.printer.streaming(f"waiting for messages of {destination}")
                    received = await consumer.receive(None)
            else:
                received = await (consumer.receive(timeout_s) if timeout_s else consumer.receive_nowait())
            if received is None:
                received_count = f"only {number} of {count} messages were" if number else "no message was"
                raise errors.TimedOut(f"{received_count} received from {destination}")
            row = rows.message_row(received)
            invocation.printer.item(row, str(complete.builtins(row.body)))
            await received.acknowledge()

    common.with_connection(invocation, to, work, client_id)


@message.command(examples=[("muster message browse orders --where \"region = 'north'\"", "")])
@_queue
@common.selector
@command.limit(100, "Maximum number of messages.")
@connection.options
@command.pass_invocation
def browse(
    invocation: command.Invocation,
    queue: str,
    selector: str | None,
    limit: int,
    to: connection.ConnectionOptions,
) -> None:
    """Show the messages of a queue without removing them."""
    from muster.message import listings

    browsed = _browse(invocation, queue, selector, limit, to)
    empty = f"no message of the queue {queue} matches" if selector else f"the queue {queue} is empty"
    invocation.printer.rows(browsed, listings.MESSAGES, empty=empty)


def _browse(
    invocation: command.Invocation,
    queue: str,
    selector: str | None,
    limit: int,
    to: connection.ConnectionOptions,
) -> list[rows.MessageRow]:
    from muster.message import destinations, rows

    async def work(connected: api.Connection) -> list[rows.MessageRow]:
        waiting_rows: list[rows.MessageRow] = []
        async for waiting in connected.session().browse(destinations.queue(queue), selector, must_exist=True):
            waiting_rows.append(rows.message_row(waiting))
            if len(waiting_rows) == limit:
                break
        return waiting_rows

    browsed: list[rows.MessageRow] = common.with_connection(invocation, to, work)
    return browsed


@message.command(examples=[("muster message queues", "with depth, consumers and rejected messages")])
@connection.options
@command.pass_invocation
def queues(invocation: command.Invocation, to: connection.ConnectionOptions) -> None:
    """List the queues."""
    from muster.message import listings, protocol

    reply = common.with_connection(invocation, to, lambda connected: connected.request(protocol.ListQueues()))
    invocation.printer.rows(reply.queues, listings.QUEUES, empty="there are no queues")


@message.command(examples=[("muster message subscriptions", "")])
@connection.options
@command.pass_invocation
def subscriptions(invocation: command.Invocation, to: connection.ConnectionOptions) -> None:
    """List the durable subscriptions."""
    from muster.message import listings, protocol

    reply = common.with_connection(
        invocation, to, lambda connected: connected.request(protocol.ListSubscriptions())
    )
    invocation.printer.rows(
        reply.subscriptions, listings.SUBSCRIPTIONS, empty="there are no durable subscriptions"
    )


@message.command(
    acts=("unsubscribe", "subscription:{name}"),
    examples=[("muster message unsubscribe all --client-id office", "its messages are discarded")],
)
@click.argument("name", shell_complete=live_names.SUBSCRIPTIONS)
@click.option("--client-id", metavar="ID", help="Client ID (default: shared by clients without an ID).")
@click.option(
    "--identity",
    metavar="IDENTITY",
    help="Identity of the client (default: your own); requires the role operator.",
)
@connection.options
@command.pass_invocation
def unsubscribe(
    invocation: command.Invocation,
    name: str,
    client_id: str | None,
    identity: str | None,
    to: connection.ConnectionOptions,
) -> None:
    """Delete a durable subscription and discard its messages.

    Fails while the subscription is in use.
    """
    from muster.message import protocol

    if identity is not None and client_id is None:
        raise click.UsageError(
            "--identity requires --client-id: subscriptions without a client ID are shared"
        )

    async def work(connected: api.Connection) -> None:
        of = (identity or connected.bus.identity, client_id) if client_id is not None else None
        await connected.request(protocol.EndSubscription(connected.name, name, owner=of))

    common.with_connection(invocation, to, work)
    invocation.printer.done(
        {"subscription": name, "client_id": client_id, "identity": identity},
        f"the subscription {name} was deleted",
    )


@message.command(
    examples=[("muster message purge orders --where \"region = 'north'\"", "")],
)
@_queue
@common.selector
@connection.options
@command.pass_invocation
def purge(
    invocation: command.Invocation, queue: str, selector: str | None, to: connection.ConnectionOptions
) -> None:
    """Discard the messages of a queue."""
    from muster.message import protocol

    reply = common.with_connection(
        invocation, to, lambda connected: connected.request(protocol.PurgeQueue(queue, selector))
    )
    invocation.printer.done(
        {"queue": queue, "purged": reply.count},
        f"discarded {units.format_count(reply.count, 'message')} of {queue}",
    )


@message.command(
    examples=[
        ("muster message scheduled", "with delivery times"),
        ("muster message scheduled queue:orders", "those of one destination"),
    ],
)
@click.argument("destination", required=False, shell_complete=live_names.DESTINATIONS)
@command.limit(100, "Maximum number of messages.", at_most=1000)
@connection.options
@command.pass_invocation
def scheduled(
    invocation: command.Invocation, destination: str | None, limit: int, to: connection.ConnectionOptions
) -> None:
    """List messages with a delivery time in the future."""
    from muster.message import listings, protocol

    only = None if destination is None else str(common.destination(destination))
    request = protocol.ListScheduled(only, limit=limit)
    reply = common.with_connection(invocation, to, lambda connected: connected.request(request))
    invocation.printer.rows(reply.scheduled, listings.SCHEDULED, empty="no messages are scheduled")


@message.command(
    acts=("cancel", "scheduled:{message_id}"),
    examples=[("muster message cancel ID:client-1:4", "a message that `muster message scheduled` lists")],
)
@click.argument("message_id", metavar="ID")
@connection.options
@command.pass_invocation
def cancel(invocation: command.Invocation, message_id: str, to: connection.ConnectionOptions) -> None:
    """Cancel a scheduled message before its delivery time.

    ID is the message id, or the number that `muster message scheduled` shows.
    """
    from muster.core import errors
    from muster.message import protocol

    if message_id.isdecimal() and len(message_id) < NUMBER_DIGITS:
        request = protocol.CancelScheduled(int(message_id))
    else:
        request = protocol.CancelScheduled(id=message_id)
    reply = common.with_connection(invocation, to, lambda connected: connected.request(request))
    if not reply.count:
        raise errors.NotFound(f"the message {message_id} is not scheduled: it was delivered or cancelled")
    invocation.printer.done({"id": message_id, "cancelled": reply.count}, f"cancelled {message_id}")


@message.command("dead-letters", examples=[("muster message dead-letters", "with reasons")])
@common.selector
@command.limit(100, "Maximum number of messages.")
@connection.options
@command.pass_invocation
def dead_letters(
    invocation: command.Invocation, selector: str | None, limit: int, to: connection.ConnectionOptions
) -> None:
    """Show undeliverable messages and the reasons."""
    from muster.message import destinations, listings, rows

    browsed = _browse(invocation, destinations.DEAD_LETTERS, selector, limit, to)
    invocation.printer.rows(
        list(map(rows.dead_letter, browsed)),
        listings.DEAD_LETTERS,
        empty="there are no dead letters",
    )


@message.command(
    examples=[
        ("muster message move dead-letters", "back to their original destinations"),
        ("muster message move orders --to queue:later --where 'amount > 100'", ""),
    ],
)
@_queue
@click.option(
    "--to",
    "target",
    metavar="DESTINATION",
    help="Destination (default: the original destination of each message).",
)
@common.selector
@command.limit(1000, "Maximum number of messages.", at_most=2**31 - 1)
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
    """Move the messages of a queue to another destination."""
    from muster.message import protocol

    if target is not None:
        common.destination(target)
    request = protocol.MoveMessages(queue, target, selector, limit)
    reply = common.with_connection(invocation, to, lambda connected: connected.request(request))
    invocation.printer.done(
        {"queue": queue, "moved": reply.count},
        f"moved {units.format_count(reply.count, 'message')} of {queue}",
    )
