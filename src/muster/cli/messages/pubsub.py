"""``muster pub``, ``sub`` and ``request``: publish, subscribe, request.

All notations of topics (`muster.core.topics`) are accepted: ``Course/CPS616``, ``Course=CPS616``. With
``--raw`` the argument is a subject of the broker.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection, live_names
from muster.core import units

if TYPE_CHECKING:
    from muster.bus import api

raw_option = click.option("--raw", is_flag=True, help="TOPIC is a subject of the broker.")
header_option = click.option(
    "-H", "--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header; may be repeated."
)


def _headers(arguments: tuple[str, ...]) -> dict[str, str]:
    pairs = [argument.partition("=") for argument in arguments]
    for (name, equals, _), text in zip(pairs, arguments, strict=True):
        if not (name and equals):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--header")
    return {name: value for name, _, value in pairs}


def _subject(topic: str, raw: bool) -> str:
    from muster.core import topics

    return topic if raw else topics.Topic.parse(topic).subject


def _payload(data: str | None) -> bytes:
    """The argument, or the contents of stdin."""
    if data is None or data == "-":
        if sys.stdin.isatty():
            sys.stderr.write("reading the message from the terminal; Ctrl-D ends it\n")
        return sys.stdin.buffer.read()
    return data.encode()


def _record(message: api.Message) -> dict[str, Any]:
    """A message as plain values. Data that is not UTF-8 is in ``data_base64``."""
    from muster.core import errors, topics

    record: dict[str, Any] = {"subject": message.subject, "topic": None}
    with contextlib.suppress(errors.MusterError):
        record["topic"] = str(topics.Topic.from_subject(message.subject))
    try:
        record["data"] = message.data.decode()
    except UnicodeDecodeError:
        record["data_base64"] = base64.b64encode(message.data).decode()
    record["headers"] = dict(message.headers)
    record["received_at"] = datetime.datetime.now(datetime.UTC).isoformat()
    return record


def _line(record: Mapping[str, Any]) -> str:
    data = record.get("data", record.get("data_base64", ""))
    return f"{record['topic'] or record['subject']}  {data}"


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster pub Course/CPS616/Session/HPJava 'room 4'", ""),
        ("muster pub Course=CPS616,Session=HPJava 'room 4'", "the same topic, as tags"),
        ("echo '{\"load\": 0.7}' | muster pub nodes/n1 -H kind=report", "data from stdin, with a header"),
        (
            "muster pub nodes/n1 up --stream nodes --make-stream",
            "wait until it is stored in a durable stream",
        ),
    ],
)
@click.argument("topic", shell_complete=live_names.TOPICS)
@click.argument("data", required=False)
@header_option
@click.option("--lines", is_flag=True, help="Publish each line of stdin as a message.")
@click.option("--stream", metavar="NAME", help="Publish to this durable stream and wait until it is stored.")
@click.option("--make-stream", is_flag=True, help="Create the stream for this topic if it does not exist.")
@raw_option
@connection.options
@command.pass_invocation
def pub(
    invocation: command.Invocation,
    topic: str,
    data: str | None,
    headers: tuple[str, ...],
    lines: bool,
    stream: str | None,
    make_stream: bool,
    raw: bool,
    to: connection.ConnectionOptions,
) -> None:
    """Publish a message to a topic.

    DATA is the message; without it, or with '-', it is read from stdin.
    """
    if lines and data is not None:
        raise click.BadParameter("reads the messages from stdin: DATA must be omitted", param_hint="--lines")
    subject, with_headers = _subject(topic, raw), _headers(headers)
    payloads = sys.stdin.buffer.read().splitlines() if lines else [_payload(data)]
    sequences = command.run(
        _publish(invocation, to, subject, payloads, with_headers, stream, make_stream=make_stream)
    )
    size = sum(map(len, payloads))
    what = units.format_count(size, "byte")
    if lines:
        what = f"{units.format_count(len(payloads), 'message')}, {what}"
    stored = f", stored as {sequences[-1]} in {stream}" if sequences else ""
    facts: dict[str, Any] = {"subject": subject, "messages": len(payloads), "bytes": size}
    if stream:
        facts |= {"stream": stream, "sequences": sequences}
    invocation.printer.done(facts, f"published {what} to {topic}{stored}")


async def _publish(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    subject: str,
    payloads: list[bytes],
    headers: dict[str, str],
    stream: str | None,
    *,
    make_stream: bool,
) -> list[int]:
    from muster.bus import api
    from muster.core import errors

    async with await connection.connect(invocation, to) as bus:
        if stream is not None:
            stream_settings = api.StreamSettings(stream, subjects=(subject,))
            try:
                opened = await bus.stream(stream_settings) if make_stream else await bus.open_stream(stream)
            except errors.NotFound as error:
                raise errors.NotFound(
                    f"there is no stream {stream!r}", hint="create it with --make-stream"
                ) from error
            return [await opened.publish(subject, data, headers=headers) for data in payloads]
        for data in payloads:
            await bus.publish(subject, data, headers=headers)
        await bus.flush()
        if bus.statistics().violations:
            raise errors.Forbidden(
                f"{bus.identity} may not publish to {subject}",
                hint=f"`muster creds show {bus.identity}` lists its permissions",
            )
        return []


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster sub 'Course/*/Session/>'", "until Ctrl-C"),
        ("muster sub Course=*,Session=HPJava", "all courses with this session"),
        ("muster sub 'nodes/>' --where \"load > 0.5 AND kind = 'report'\" -o json | jq .data", ""),
        ("muster sub ping --reply pong", "reply to requests"),
    ],
)
@click.argument("topic", shell_complete=live_names.TOPIC_PATTERNS)
@click.option("-n", "--count", type=command.CountParam(1), help="Stop after this many messages.")
@command.duration("--timeout", None, "Stop after this time.", may_be_zero=True)
@click.option("--group", metavar="NAME", help="Share the messages among the members of this group.")
@click.option("--where", metavar="PREDICATE", help="Only messages that match this predicate.")
@click.option("--reply", metavar="DATA", help="Reply to each request with this text.")
@raw_option
@connection.options
@command.pass_invocation
def sub(
    invocation: command.Invocation,
    topic: str,
    count: int | None,
    timeout_s: float | None,
    group: str | None,
    where: str | None,
    reply: str | None,
    raw: bool,
    to: connection.ConnectionOptions,
) -> None:
    """Print the messages of a topic as they arrive.

    TOPIC may contain wildcards. With -o json each message is one object on its own line. PREDICATE refers to
    the headers of a message and, if its data is a JSON object, to the fields. With --count, the exit code is
    5 if --timeout expires first.
    """
    from muster.client import messages
    from muster.core import errors

    printer = invocation.printer
    messages.selector(where)  # report syntax errors before connecting

    async def show() -> None:
        seen = 0
        async with (
            await connection.connect(invocation, to) as bus,
            await messages.AsyncSubscription.open(bus, topic, where=where, group=group, raw=raw) as received,
        ):
            printer.streaming(f"listening on {topic} as {bus.identity}")
            while True:
                message = await received.next_delivery()
                record = _record(message)
                printer.item(record, _line(record))
                if reply is not None and message.reply:
                    try:
                        await message.respond(reply.encode())
                    except errors.InvalidInput as error:  # its sender wants the reply elsewhere
                        printer.note(error.message)
                seen += 1
                if seen == count:
                    return

    what = f"{units.format_count(count or 0, 'message')} on {topic}"
    command.run(_within(show(), timeout_s, complain=count is not None, what=what))


async def _within(work: Any, timeout_s: float | None, *, complain: bool, what: str) -> None:
    import asyncio

    from muster.core import errors

    try:
        async with asyncio.timeout(timeout_s):
            await work
    except TimeoutError:
        if complain:
            waited = units.rounded_duration(timeout_s or 0.0)
            raise errors.TimedOut(f"received fewer than {what} in {waited}") from None


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster request ping hello", ""),
        ("muster request 'nodes/all' '' --all --timeout 1s", "all replies within a second"),
    ],
)
@click.argument("topic", shell_complete=live_names.TOPICS)
@click.argument("data", required=False, default="")
@header_option
@command.duration("--timeout", "5s", "Time limit.", may_be_zero=True)
@click.option("--all", "everybody", is_flag=True, help="Collect replies until the time limit.")
@click.option("--enough", type=command.CountParam(1), help="Collect this number of replies.")
@raw_option
@connection.options
@command.pass_invocation
def request(
    invocation: command.Invocation,
    topic: str,
    data: str,
    headers: tuple[str, ...],
    timeout_s: float,
    everybody: bool,
    enough: int | None,
    raw: bool,
    to: connection.ConnectionOptions,
) -> None:
    """Send a request to a topic and print the reply.

    DATA '-' is read from stdin. The exit code is 5 if there is no subscriber or no reply in time.
    """
    from muster.client import messages
    from muster.core import errors

    subject, payload, with_headers = _subject(topic, raw), _payload(data), _headers(headers)

    async def ask() -> list[api.Message]:
        async with await connection.connect(invocation, to) as bus:
            if everybody or enough:
                return await bus.gather(
                    subject, payload, enough=enough, timeout_s=timeout_s, headers=with_headers
                )
            options: Any = {"headers": with_headers, "timeout_s": timeout_s}
            return [await messages.request(bus, topic, subject, payload, **options)]

    answers = command.run(ask())
    for answer in answers:
        record = _record(answer)
        invocation.printer.item(record, str(record.get("data", record.get("data_base64"))))
    if not answers:
        raise errors.Unavailable(f"no reply on {topic} within {units.rounded_duration(timeout_s)}")
