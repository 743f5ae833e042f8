"""``muster report``: the reports of the system, groups and machines, and analyses of the history."""

from __future__ import annotations

import sys
from typing import Any

import click

from muster.cli import command, connection, live_names, output
from muster.cli.domain import config
from muster.cli.monitoring import analyses
from muster.core.formats import cell_texts

BEHIND_S = 60.0  # a report of the pipeline describes a completed window and arrives with a delay


class ReportQuery(command.MusterCommand):
    """Supports XML in the published schema as a further output format."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for param in self.params:
            if param.name == "output":
                param.type = click.Choice((*output.FORMATS, "xml"))


@click.group(
    cls=command.MusterGroup,
    examples=[
        ("muster report system", ""),
        ("muster report capacity --period week --to week.html", "use and growth of the fleet, with plots"),
        ("muster report disks", "disks that become full within a month"),
    ],
)
def report() -> None:
    """Print reports of the system, groups and machines, and analyses of their history."""


report.add_command(analyses.capacity)
report.add_command(analyses.disks)
report.add_command(analyses.outliers)


at_option = click.option(
    "--at", metavar="TIME", help="Time of the report: ISO 8601, or a duration before now such as 5m."
)
window_option = command.duration("--window", "60s", "How far back to look.")


@report.command(
    cls=ReportQuery, examples=[("muster report system", ""), ("muster report system --at 2h", "")]
)
@at_option
@window_option
@connection.options
@command.pass_invocation
def system(
    invocation: command.Invocation, at: str | None, window_s: float, to: connection.ConnectionOptions
) -> None:
    """Print the report of the system.

    Prints the report of the pipeline if it runs, else a report computed from the latest data of the channels.
    With --at, older reports are read from the history of this home.
    """
    _print(invocation, "system", "", at, window_s, to)


def _add_named(scope: str, of: str, names: live_names.Completer, example: tuple[str, str]) -> None:
    """Add the command that prints the report of a group or of a machine."""

    @report.command(scope, cls=ReportQuery, examples=[example], help=f"Print the report of {of}.")
    @click.argument("name", shell_complete=names)
    @at_option
    @window_option
    @connection.options
    @command.pass_invocation
    def named(
        invocation: command.Invocation,
        name: str,
        at: str | None,
        window_s: float,
        to: connection.ConnectionOptions,
    ) -> None:
        _print(invocation, scope, name, at, window_s, to)


_add_named(
    "group",
    "a group of machines",
    live_names.GROUPS,
    ("muster report group web -o xml", "with the schema docs/schemas/report.xsd"),
)
_add_named(
    "node",
    "a machine and its services",
    live_names.MACHINES,
    ("muster report node web-7 --at 2026-11-15T12:00:00Z", "a past report"),
)


def _print(
    invocation: command.Invocation,
    scope: str,
    name: str,
    at: str | None,
    window_s: float,
    to: connection.ConnectionOptions,
) -> None:
    from muster.core import errors

    at_ms = time_ms(at, "--at")

    try:
        current = connection.call(invocation, to, lambda bus: find(bus, scope, name, at_ms, window_s))
    except (errors.NotFound, errors.Unavailable):
        current = None
        if at_ms is not None and not (to.servers or to.locator or invocation.profile):
            settings = config.load(invocation)
            root = settings.pipeline.history_root(settings.domain.folder)
            current = past(root, scope, name, at_ms, window_s)
        if current is None:
            raise
    show(invocation, current)


def past(root: str, scope: str, name: str, at_ms: int, window_s: float) -> Any:
    """The report from the history; None if the history has no data of that time."""
    import pyarrow as pa

    from muster.core.reports import columns
    from muster.monitor import live_view
    from muster.pipeline.history import search

    word = name.replace("'", "''")
    where = {"node": f"machine = '{word}'", "group": f"group = '{word}'"}.get(scope, "TRUE")
    schema = columns.node_schema()
    stored = tuple("metrics" if field == "extra" else field for field in schema.names)
    from_ms = at_ms - int(window_s * 1000)
    query = search.HistorySearch(where=where, from_ms=from_ms, to_ms=at_ms + 1, columns=stored)
    batches = list(search.search(root, query))
    if not batches:
        return None
    reports = pa.Table.from_batches(batches).rename_columns(schema.names).cast(schema)
    nodes = live_view.latest(reports.to_batches())
    return _view(nodes, scope, name, from_ms, at_ms)


def _view(nodes: Any, scope: str, name: str, from_ms: int, to_ms: int) -> Any:
    from muster.monitor import live_view

    if scope == "node":
        return live_view.node(nodes, name)
    if scope == "system":
        return live_view.system_report(nodes, from_ms=from_ms, to_ms=to_ms)
    groups = live_view.group_reports(nodes, from_ms=from_ms, to_ms=to_ms)
    return next((group for group in groups if group.group == name), None)


async def find(bus: Any, scope: str, name: str, at_ms: int | None, window_s: float) -> Any:
    import time

    from muster.core import errors, messages, units
    from muster.core.reports import columns
    from muster.monitor import client, live_view

    if scope != "node":
        kind: Any = columns.SystemReport if scope == "system" else columns.GroupReport
        made = [messages.decode(data, kind) async for data in client.results(bus, scope, name)]
        # The last report of a stopped pipeline may be out of date.
        then_ms = time.time_ns() // 1_000_000 if at_ms is None else at_ms
        since_ms = then_ms - int((window_s + BEHIND_S) * 1000)
        fitting = [
            candidate
            for candidate in made
            if since_ms <= candidate.to_ms and (at_ms is None or candidate.to_ms <= at_ms)
        ]
        if fitting:
            return max(fitting, key=lambda candidate: candidate.to_ms)
    batches = await client.recent(bus, window_s=window_s, at_ms=at_ms)
    now_ms = at_ms or time.time_ns() // 1_000_000
    nodes = live_view.latest(stored.batch for stored in batches)
    if not nodes.num_rows:
        raise errors.NotFound(
            f"no report in the last {units.rounded_duration(window_s)}"
            if at_ms is None
            else f"no report in the {units.rounded_duration(window_s)} before this time",
            hint="use a larger --window, or search with `muster history`",
        )
    view = _view(nodes, scope, name, now_ms - int(window_s * 1000), now_ms)
    if view is None:
        raise errors.NotFound(
            f"no report of the {scope} {name!r} in the last {units.rounded_duration(window_s)}"
        )
    return view


def show(invocation: command.Invocation, shown: Any) -> None:
    import msgspec

    from muster.core import messages

    if invocation.output == "xml":
        from muster.monitor import report_xml

        sys.stdout.write(report_xml.encode(shown).decode() + "\n")
        return
    printer = output.Printer(invocation.output)
    if not printer.for_people:
        printer.facts(shown)
        return
    facts = msgspec.to_builtins(shown)
    if isinstance(shown, messages.NodeReport):
        head = {
            key: value for key, value in facts.items() if key not in ("metrics", "services", "kind", "boot")
        }
        printer.facts({**head, **{name: _rounded(value) for name, value in shown.metrics.items()}})
        services = [
            {"service": service.name, "state": service.state.value, **service.metrics}
            for service in shown.services
        ]
        if services:
            printer.rows(services, ("service", "state"))
        return
    printer.facts(
        {key: facts.get(key) for key in ("group", "machines", "stale", "states", "partial", "dropped")}
    )
    rows = [
        {"metric": name, "mean": _figure(name, rollup.sum / rollup.count if rollup.count else None)}
        | {key: _figure(name, getattr(rollup, key)) for key in ("min", "p50", "p95", "max")}
        for name, rollup in shown.metrics.items()
    ]
    printer.rows(rows, ("metric", "mean", "min", "p50", "p95", "max"))


def _figure(metric: str, value: float | None) -> str:
    if value is None:
        return ""
    return cell_texts.cell(metric, _rounded(value)) + ("/s" if metric.endswith("_bytes_s") else "")


def _rounded(value: float) -> float:
    return round(value, 2) if abs(value) >= 1 else value


def time_ms(text: str | None, option: str) -> int | None:
    """A time in ISO 8601, or a duration before now."""
    import datetime
    import time

    from muster.core import errors, units

    if text is None:
        return None
    try:
        try:
            at_s = time.time() - units.parse_duration_s(text)
        except errors.InvalidInput:
            at_s = datetime.datetime.fromisoformat(text).timestamp()  # local time without a time zone
        datetime.datetime.fromtimestamp(at_s, datetime.UTC)  # or it is out of range
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(
            f"{text!r} is neither a time (ISO 8601) nor a duration", param_hint=option
        ) from None
    return int(at_s * 1000)
