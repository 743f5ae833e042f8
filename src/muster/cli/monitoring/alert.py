"""``muster alert``: list, acknowledge, resolve and silence alerts, and test their contacts."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection, leaf, live_names, tables
from muster.pipeline import operations

if TYPE_CHECKING:
    from muster.bus import api
    from muster.core import messages
    from muster.pipeline import client


@click.group(cls=command.MusterGroup, examples=[("muster alert list", "")])
def alert() -> None:
    """List, acknowledge, resolve and silence alerts."""


def _with(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    work: Callable[[client.PipelineClient], Awaitable[Any]],
) -> Any:
    from muster.pipeline import client

    return connection.call(invocation, to, lambda bus: work(client.PipelineClient(bus)))


_TEXTS = ("rule", "about", "severity", "state", "reason", "group")
_where = click.option(
    "--where", default="", metavar="PREDICATE", help=f"Only alerts that match: {', '.join(_TEXTS)}, value."
)


def _selector(where: str) -> Callable[[messages.Alert], bool]:
    from muster.core.formats import complete
    from muster.predicates import types
    from muster.predicates.analysis import type_check
    from muster.predicates.backends import python
    from muster.predicates.syntax import parser

    if not where:
        return lambda _: True
    condition = parser.parse(where)
    model = dict.fromkeys(_TEXTS, types.parse_type("string")) | {"value": types.parse_type("double")}
    type_check.require(condition, model, where)
    matches = python.compile(condition)
    return lambda alert: matches({**alert.labels, **complete.builtins(alert)}.get)


@alert.command(
    "list",
    examples=[("muster alert list", ""), ("muster alert list --where \"severity = 'critical'\" -o json", "")],
)
@_where
@connection.options
@command.pass_invocation
def list_(invocation: command.Invocation, where: str, to: connection.ConnectionOptions) -> None:
    """List the alerts that are not resolved, of the pipeline and of the domain's budgets."""
    from muster.bus.brokers import control
    from muster.core import errors
    from muster.pipeline import client

    async def work(bus: api.Bus) -> list[messages.Alert]:
        budgets: list[messages.Alert] = []
        with contextlib.suppress(errors.Unavailable, errors.Forbidden):  # brokers without a domain's process
            budgets = await control.BrokerControl(bus).alerts()
        try:
            return await client.PipelineClient(bus).alerts() + budgets
        except errors.Unavailable:
            if not budgets:
                raise
            return budgets

    selects = _selector(where)
    alerts = [row for row in connection.call(invocation, to, work) if selects(row)]
    invocation.printer.rows(alerts, operations.ALERTS.columns, empty="there are no alerts")


@alert.command(examples=[("muster alert watch", "until Ctrl-C")])
@_where
@connection.options
@command.pass_invocation
def watch(invocation: command.Invocation, where: str, to: connection.ConnectionOptions) -> None:
    """Print each change of an alert as it happens."""
    from muster.core import errors

    selects = _selector(where)

    async def work(ask: client.PipelineClient) -> None:
        if not await ask.has_alerts():
            hint = "start one with `muster run pipeline`"
            raise errors.Unavailable("no pipeline has published alerts on this bus", hint=hint)
        invocation.printer.streaming("watching alerts")
        async for _, changed in ask.follow_alerts():
            if not selects(changed):
                continue
            words = (tables.utc(changed.since_ms / 1000), changed.severity.value, changed.state.value)
            line = (
                *words,
                changed.rule,
                changed.about,
                "" if changed.value is None else f"{changed.value:g}",
            )
            invocation.printer.item(changed, "  ".join((*line, changed.reason)))

    _with(invocation, to, work)


_COLUMNS = "RULE and ABOUT are the first columns of `muster alert list`."
_alert = (
    click.argument("rule", shell_complete=live_names.RULES),
    click.argument("about", shell_complete=live_names.ALERTED),
)
leaf.add(
    alert,
    operations.ACKNOWLEDGE,
    *_alert,
    name="ack",
    more=f"{_COLUMNS} The alert stays acknowledged until it is resolved.",
    done="acknowledged: {rule} {about}",
    examples=[("muster alert ack hot node:web-7", "")],
)
leaf.add(
    alert,
    operations.RESOLVE,
    *_alert,
    more=f"{_COLUMNS} The alert is raised again when its rule becomes true again. A rule about groups, zones "
    "or the system is evaluated for every window: if it is still true, the alert is raised again with the "
    "next one.",
    done="resolved: {rule} {about}",
    examples=[("muster alert resolve silent node:web-7", "the machine was replaced")],
)


@alert.command(
    examples=[
        ("muster alert silence \"group = 'web'\" --for 2h --reason 'being replaced'", ""),
        ("muster alert silence \"rule = 'hot' AND about LIKE 'node:db-%'\" --for 30m", ""),
    ],
)
@click.argument("covers", metavar="PREDICATE")
@command.duration("--for", None, "Duration such as 30m, 2h or 1d.", required=True)
@click.option("--reason", default="", help="Reason, shown in the list of silences.")
@connection.options
@command.pass_invocation
def silence(
    invocation: command.Invocation, covers: str, for_s: float, reason: str, to: connection.ConnectionOptions
) -> None:
    """Silence the alerts that PREDICATE selects: they are not sent to contacts.

    PREDICATE can use the names rule, about, scope, severity and group.
    """
    _silence(invocation, to, covers, for_s, None, reason)


@alert.command(
    examples=[("muster alert maintenance \"group = 'web'\" --at 2030-01-01T02:00:00Z --for 1h", "")],
)
@click.argument("covers", metavar="PREDICATE")
@click.option("--at", required=True, metavar="TIME", help="Start time in ISO 8601.")
@command.duration("--for", None, "Duration such as 30m, 2h or 1d.", required=True)
@click.option("--reason", default="", help="Reason, shown in the list of silences.")
@connection.options
@command.pass_invocation
def maintenance(
    invocation: command.Invocation,
    covers: str,
    at: str,
    for_s: float,
    reason: str,
    to: connection.ConnectionOptions,
) -> None:
    """Schedule a maintenance window: a silence with a start time."""
    _silence(invocation, to, covers, for_s, moment_ms(at), reason)


leaf.add(
    alert,
    operations.UNSILENCE,
    click.argument("id", shell_complete=live_names.SILENCES),
    done="the silence {id} was ended",
    examples=[("muster alert unsilence 3f2a9c01", "")],
)
leaf.add(
    alert,
    operations.SILENCES,
    empty="there are no silences",
    examples=[("muster alert silences", "")],
)


@alert.command(
    "test",
    examples=[
        ("muster alert test on-call", "exit code 1 if it cannot be notified"),
        ("muster alert test team -o json", ""),
    ],
)
@click.argument("contact")
@connection.options
@command.pass_invocation
def test_(invocation: command.Invocation, contact: str, to: connection.ConnectionOptions) -> None:
    """Send a test notification to CONTACT, a contact in the file of alert rules.

    The running pipeline sends it, marked as a test, with the secrets and templates of the contact. A webhook
    is also notified that the test alert has ended.
    """
    results = _with(invocation, to, lambda ask: ask.test_contact(contact))
    invocation.printer.rows(results, ("transport", "outcome", "status", "reason"))
    if any(result.outcome != "sent" for result in results):
        raise click.exceptions.Exit(1)


def _silence(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    covers: str,
    for_s: float,
    from_ms: int | None,
    reason: str,
) -> None:
    made = _with(invocation, to, lambda ask: ask.silence(covers, for_s=for_s, from_ms=from_ms, reason=reason))
    invocation.printer.done(
        {"id": made.id, "until": _time(made.until_ms)},
        f"silence {made.id} until {tables.utc(made.until_ms / 1000)}",
    )


def moment_ms(text: str) -> int:
    """Parse an ISO 8601 time; without a time zone it is local time."""
    try:
        return int(datetime.datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a time: write one like 2030-01-31T14:00:00Z") from None


def _time(at_ms: int) -> str:
    return datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC).isoformat(timespec="seconds")
