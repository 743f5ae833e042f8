"""``muster history``: search, export and delete rows of the tables that the pipeline writes."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from muster.cli import command, live_names
from muster.cli.domain import config
from muster.cli.monitoring import alert
from muster.core import units

_SHOWN = {
    "nodes": (
        "reported_at",
        "machine",
        "group?",
        "zone?",
        "state",
        "cpu_percent",
        "memory_percent",
        "load_1m?",
    ),
    "groups": (
        "window_start",
        "scope",
        "name",
        "machines?",
        "stale?",
        "cpu_percent_mean",
        "cpu_percent_p95",
        "memory_percent_mean",
        "load_1m_mean?",
    ),
    "alerts": ("changed_at", "severity", "state", "rule", "about", "value", "reason?"),
    "hourly": (
        "hour",
        "machine",
        "group",
        "reports",
        "cpu_percent_mean",
        "cpu_percent_max",
        "disk_percent_max",
    ),
}


root_option = click.option(
    "--dir",
    "root",
    metavar="LOCATION",
    help="Folder or URL of the history (default: the history of the home).",
)


as_of_option = click.option(
    "--as-of",
    "as_of",
    metavar="TIME",
    help="Read the tables as of this time: ISO 8601, or a duration before now such as 2h.",
)


def as_of_moment(text: str | None) -> datetime.datetime | None:
    from muster.cli.monitoring import report

    at_ms = report.time_ms(text, "--as-of")
    return None if at_ms is None else datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)


def period_options(function: Any) -> Any:
    """``--from``, ``--until``, ``--last`` and ``--as-of``; the command passes them to `period`."""
    for option in (
        as_of_option,
        command.duration("--last", None, "Only rows of the last DURATION, such as 2h or 7d."),
        click.option("--until", metavar="TIME", help="End time in ISO 8601."),
        click.option("--from", "from_", metavar="TIME", help="Start time in ISO 8601."),
    ):
        function = option(function)
    return function


def period(
    *, from_: str | None, until: str | None, last_s: float | None, as_of: str | None
) -> dict[str, Any]:
    """The fields of `HistorySearch`."""
    if last_s and from_:
        raise click.UsageError("give either --last or --from")
    from_ms = alert.moment_ms(from_) if from_ else None
    if last_s:
        from_ms = int((time.time() - last_s) * 1000)
    until_ms = alert.moment_ms(until) if until else None
    return {"from_ms": from_ms, "to_ms": until_ms, "as_of": as_of_moment(as_of)}


def resolve_root(invocation: command.Invocation, root: str | None) -> str:
    """The location of the history. `errors.NotFound` if there are no tables."""
    from muster.core import errors
    from muster.pipeline.history import delta, storage, tables

    if root is None:
        settings = config.load(invocation)
        root = settings.pipeline.history_root(settings.domain.folder)
    location = storage.normalize(root, setting="--dir")
    if not any(delta.exists(location, name) for name in tables.definitions()):
        raise errors.NotFound(f"there is no history in {location}", hint="`muster run pipeline` writes it")
    return location


@contextlib.contextmanager
def spark_session(invocation: command.Invocation) -> Iterator[Any]:
    """A Spark session on the configured master, for one batch job."""
    from muster.pipeline.source import session

    settings = config.load(invocation).pipeline
    with (
        invocation.printer.waiting("running the query with Spark"),
        session.temporary_session(
            settings.master,
            memory=settings.memory,
            extra=settings.spark_settings(),
            verbose=invocation.debug,
        ) as spark,
    ):
        yield spark


class HistoryGroup(command.MusterGroup):
    """``muster history PREDICATE`` is ``muster history search PREDICATE``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["search", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=HistoryGroup,
    invoke_without_command=True,
    examples=[
        ("muster history \"group = 'web' AND cpu_percent > 90\" --last 1h", "reports with a high CPU load"),
        ("muster history export nodes --last 1d --to nodes.parquet", ""),
    ],
)
def history() -> None:
    """Search, export and delete the history of reports and alerts.

    Without the name of a command, it searches: `muster history PREDICATE`. `muster sql` runs SQL.
    """


@history.command(
    examples=[
        ("muster history search \"group = 'web' AND cpu_percent > 90\" --last 1h", "a high CPU load"),
        ("muster history TRUE --by machine --of cpu_percent --last 1d -n 10", "the ten busiest"),
        ("muster history \"scope = 'system' AND cpu_percent_p95 > 90\" --in groups -o json", ""),
        ("muster history \"severity = 'critical'\" --in alerts", ""),
        ("muster history \"machine = 'web-7'\" --as-of 2h", "the tables as they were two hours ago"),
    ]
)
@click.argument("query", metavar="[PREDICATE]", default="TRUE")
@click.option(
    "--in",
    "kind",
    type=click.Choice(list(_SHOWN)),
    default="nodes",
    show_default=True,
    help="Table to search.",
)
@period_options
@click.option("--columns", metavar="NAME,…", help="Columns to show.")
@click.option("--of", metavar="COLUMN", help="Aggregate this column: count, mean, minimum, maximum.")
@click.option("--by", default="", metavar="COLUMN,…", help="With --of: group by these columns.")
@command.limit(100, "Maximum number of rows; 0: all.", at_least=0)
@root_option
@command.pass_invocation
def search(
    invocation: command.Invocation,
    /,
    query: str,
    kind: str,
    columns: str | None,
    of: str | None,
    by: str,
    limit: int,
    root: str | None,
    **between: Any,
) -> None:
    """Search the history of reports and alerts.

    The newest rows come first, except with `-n 0`.

    PREDICATE refers to the columns of the table; see docs/reference/predicates.md.
    """
    from muster.core import errors
    from muster.pipeline.history import newest_first, tables
    from muster.pipeline.history import search as query_

    location = resolve_root(invocation, root)
    shown = tuple(columns.split(",")) if columns else _SHOWN[kind] if invocation.printer.for_people else ()
    search_query = query_.HistorySearch(
        kind,
        query,
        columns=tuple(name.removesuffix("?") for name in shown),
        limit=limit if limit > 0 else None,
        **period(**between),
    )
    rows: list[dict[str, Any]] = []
    parts = tuple(filter(None, by.split(",")))
    if of and not parts:
        raise errors.InvalidInput("--of requires --by")
    with invocation.printer.waiting(f"searching {kind}"):
        if of:
            rows = query_.summarise(location, search_query, of=of, by=parts).to_pylist()
            shown = (*parts, *query_.STATISTICS)
        elif limit > 0:
            rows = tables.to_pylist(newest_first.read_page(location, search_query, limit)[0])
        else:
            for batch in query_.search(location, search_query):
                rows += tables.to_pylist(batch)
    if of and invocation.printer.for_people:  # the names of metrics say their units
        of_metric = {name: f"{of}_{name}" for name in query_.STATISTICS if name != "count"}
        rows = [{of_metric.get(name, name): value for name, value in row.items()} for row in rows]
        shown = tuple(of_metric.get(name, name) for name in shown)
    invocation.printer.rows([_plain(row) for row in rows], shown, empty="no rows match", expands=True)


@history.command(
    examples=[
        ("muster history export nodes --last 1d --to nodes.parquet", ""),
        ("muster history export groups --where \"scope = 'system'\" --to system.csv", ""),
    ]
)
@click.argument("table", type=click.Choice(list(_SHOWN)))
@click.option("--where", default="TRUE", metavar="PREDICATE", help="Only rows for which this is true.")
@period_options
@click.option("--columns", metavar="NAME,…", help="Columns to export (default: all).")
@click.option(
    "--to",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Output file: .parquet, .csv or .jsonl.",
)
@root_option
@command.pass_invocation
def export(
    invocation: command.Invocation,
    /,
    table: str,
    where: str,
    columns: str | None,
    to: Path,
    root: str | None,
    **between: Any,
) -> None:
    """Write rows of a table to a file: Parquet, CSV or JSON lines.

    The rows are copied in batches, so a table of any size can be exported.
    """
    from muster.pipeline.history import export as export_
    from muster.pipeline.history import search as query_

    chosen = tuple(filter(None, (columns or "").split(",")))
    search_query = query_.HistorySearch(table, where, columns=chosen, **period(**between))
    location = resolve_root(invocation, root)
    with invocation.printer.waiting(f"exporting {table} to {to}"):
        count = export_.write(location, search_query, to)
    invocation.printer.done(
        {"rows": count, "file": str(to)}, f"wrote {units.format_count(count, 'row')} to {to}"
    )


@history.command(
    acts=("history-forget", "{machine}"),
    examples=[("muster history forget web-7", ""), ("muster history forget web-7 --purge", "")],
)
@click.argument("machine", shell_complete=live_names.MACHINES)
@click.option(
    "--purge",
    is_flag=True,
    help="Also remove the replaced files now: --as-of then reaches no further back.",
)
@root_option
@command.pass_invocation
def forget(invocation: command.Invocation, machine: str, purge: bool, root: str | None) -> None:
    """Delete all rows of a machine, as privacy rules may require.

    Deletes its reports, its hourly rows and its alerts. The files that contained them are removed after
    pipeline.as_of_s, or at once with --purge. Rows of groups name no machines and stay.
    """
    from muster.pipeline.history import export as export_

    location = resolve_root(invocation, root)
    with invocation.printer.waiting(f"deleting the rows of {machine}"):
        deleted = export_.forget(location, machine, purge=purge)
    total = sum(deleted.values())
    invocation.printer.done(
        {"machine": machine, "deleted": deleted}, f"deleted {units.format_count(total, 'row')} of {machine}"
    )


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _value(value) for name, value in row.items()}


def _value(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return value.isoformat(timespec="milliseconds")
    return round(value, 6) if isinstance(value, float) else value
