"""``muster message udp``: topic messages in datagrams, which may be lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from muster.cli import command, connection, live_names
from muster.cli.messages import common
from muster.core import units

if TYPE_CHECKING:
    from muster.gateways import udp as datagrams
    from muster.message.client import api


@click.group(
    cls=command.MusterGroup,
    examples=[
        ("muster message udp receive 'topic:light/*' --where 'grams < 5' -n 10", ""),
        ("muster message udp send topic:light/news feather -p grams=1", ""),
    ],
)
def udp() -> None:
    """Send and receive topic messages in datagrams.

    Datagrams are encrypted, and not repeated: what the network loses is counted, not delivered.
    """


@udp.command(
    examples=[("muster message udp send topic:light/news feather -p grams=1 --count 100", "")],
)
@click.argument("topic", shell_complete=live_names.DESTINATIONS)
@click.argument("body")
@common.properties
@click.option(
    "-n", "--count", type=command.CountParam(1), default=1, show_default=True, help="Send it so often."
)
@command.duration("--wait", "10s", "How long to wait for a receiver.")
@connection.options
@command.pass_invocation
def send(
    invocation: command.Invocation,
    topic: str,
    body: str,
    properties: tuple[str, ...],
    count: int,
    wait_s: float,
    to: connection.ConnectionOptions,
) -> None:
    """Send a text message to the receivers of a topic.

    Exit code 5 if there is no receiver within --wait.
    """
    from muster.core import errors
    from muster.gateways import udp as datagrams
    from muster.message import messages

    where = common.topic(topic)

    async def work(connected: api.Connection) -> int:
        async with datagrams.UdpSession(connected) as session:
            publisher = await session.publisher(where)
            if not await publisher.wait_for_receiver(wait_s):
                raise errors.TimedOut(f"no receiver of {topic} within {wait_s:g} s")
            for _ in range(count):
                publisher.send(messages.TextMessage(body, properties=common.properties_of(properties)))
            return publisher.sent

    sent = common.with_connection(invocation, to, work)
    invocation.printer.done(
        {"topic": topic, "messages": count, "datagrams": sent},
        f"sent {units.format_count(count, 'message')} to {topic} in {units.format_count(sent, 'datagram')}",
    )


@udp.command(
    examples=[
        ("muster message udp receive topic:light/news", ""),
        ("muster message udp receive 'topic:light/>' --where 'grams < 5' -n 10 --timeout 1m", ""),
    ],
)
@click.argument("topic", shell_complete=live_names.DESTINATIONS)
@common.selector
@click.option(
    "-n", "--count", type=command.CountParam(1), default=1, show_default=True, help="Number of messages."
)
@command.duration("--timeout", None, "Stop after this time without a message.")
@click.option(
    "--host",
    metavar="HOST",
    default="127.0.0.1",
    show_default=True,
    help="IPv4 address of this machine to which senders send.",
)
@connection.options
@command.pass_invocation
def receive(
    invocation: command.Invocation,
    topic: str,
    selector: str | None,
    count: int,
    timeout_s: float | None,
    host: str,
    to: connection.ConnectionOptions,
) -> None:
    """Receive messages of a topic, which may have wildcards.

    At the end it shows how many datagrams were lost, out of order or refused. Exit code 5 if --timeout passes
    first.
    """
    from muster.core import errors
    from muster.core.formats import complete
    from muster.gateways import udp as datagrams
    from muster.message import rows

    where = common.topic(topic)

    async def work(connected: api.Connection) -> None:
        async with datagrams.UdpSession(connected, host=host) as session:
            subscriber = await session.subscriber(where, selector)
            invocation.printer.streaming(f"waiting for messages of {topic}")
            try:
                for number in range(count):
                    try:
                        async with asyncio.timeout(timeout_s):
                            received = await anext(subscriber)
                    except TimeoutError:
                        raise errors.TimedOut(
                            f"only {number} of {units.format_count(count, 'message')} of {topic} arrived"
                        ) from None
                    row = rows.message_row(received)
                    invocation.printer.item(row, str(complete.builtins(row.body)))
            finally:
                invocation.printer.note(_counters(subscriber))

    common.with_connection(invocation, to, work)


def _counters(subscriber: datagrams.UdpReceiver) -> str:
    return (
        f"received {subscriber.received}, lost {subscriber.lost}, out of order {subscriber.reordered}, "
        f"not selected {subscriber.rejected}, refused {subscriber.refused}, dropped {subscriber.dropped}"
    )
