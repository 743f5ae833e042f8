"""``muster sql``: SQL over the tables of the history and of the registry."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from muster.cli import command, connection, output, registry_calls
from muster.cli.monitoring import history
from muster.core import files, units

FILES = ("csv", "parquet")


class SqlCommand(command.MusterCommand):
    """Supports CSV and Parquet as further output formats."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for param in self.params:
            if param.name == "output":
                param.type = click.Choice((*output.FORMATS, *FILES))


@click.command(
    cls=SqlCommand,
    examples=[
        ('muster sql "SELECT zone, avg(cpu_percent) FROM nodes WHERE day = current_date GROUP BY zone"', ""),
        ('muster sql "FROM alerts_current"', "alerts that have not ended"),
        (
            "muster sql \"SELECT * FROM hourly WHERE machine = 'web-7'\" -o parquet --to web-7.parquet",
            "to a file",
        ),
        (
            'muster sql "SELECT state, count(*) FROM resources GROUP BY state"',
            "of the registry, as of now",
        ),
        (
            'muster sql --spark "SELECT count(DISTINCT machine) FROM nodes"',
            "on the configured Spark master",
        ),
    ],
)
@click.argument("query", metavar="QUERY")
@click.option("--spark", "on_spark", is_flag=True, help="Run the query with Spark on the configured master.")
@history.as_of_option
@command.limit(10_000, "Maximum number of rows; 0: all.", at_least=0)
@command.duration("--timeout", "60s", "Maximum time of the query, without Spark.")
@click.option(
    "--memory",
    "memory_bytes",
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    callback=lambda _, __, text: units.parse_size_bytes(text),
    help="Maximum memory of the query, without Spark.",
)
@click.option(
    "--to", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file (csv, json, parquet)."
)
@history.root_option
@command.pass_invocation
def sql(
    invocation: command.Invocation,
    query: str,
    on_spark: bool,
    as_of: str | None,
    limit: int,
    timeout_s: float,
    memory_bytes: int,
    to: Path | None,
    root: str | None,
) -> None:
    """Run a SELECT over the tables of the history and of the registry.

    The tables of the history are nodes, groups, alerts and hourly; alerts_current is a view. See
    docs/reference/history.md. Those of the registry are resources, agents, managers, rollouts, jobs,
    secrets (without values) and orphans, with the columns of `-o wide` of the other commands; nested values
    are JSON. DuckDB runs the query in this process, without access to files or the network; --spark runs it
    on the configured master, for more data than one machine can process.

    If the columns do not fit into the terminal, each row is printed as a list of its values; -o wide prints
    the table in any case.
    """
    moment = history.as_of_moment(as_of)
    rows = limit if limit > 0 else None
    if on_spark:
        location = history.resolve_root(invocation, root)
        table, truncated = _with_spark(invocation, location, query, rows, moment)
    else:
        from muster.pipeline.history import sql as sql_

        limits = sql_.SqlLimits(timeout_s, memory_bytes, rows)
        names = sql_.table_names(query)
        more = _of_registry(invocation, names, moment)
        of_history = history.resolve_root(invocation, root) if names - more.keys() or not names else None
        with invocation.printer.waiting("running the query"):
            result = sql_.query(of_history, query, limits, as_of=moment, more=more)
        table, truncated = result.table, result.truncated
    _write(invocation, table, to)
    if truncated:
        invocation.printer.note(f"only the first {limit:,} rows; -n sets another limit")


def _of_registry(invocation: command.Invocation, names: set[str], moment: Any) -> dict[str, Any]:
    """Those of the tables that are the registry's."""
    from muster.cli.monitoring import registry_tables

    names = names & registry_tables.TABLES.keys()
    if names and moment is not None:
        raise click.UsageError(f"--as-of is for tables of the history, not for {', '.join(sorted(names))}")
    if not names:
        return {}
    return registry_calls.call_registry(
        invocation, connection.ConnectionOptions(), lambda fleet: registry_tables.read(fleet, names)
    )


def _stored_columns() -> set[str]:
    """The names of columns of the tables; an alias of a query says nothing of a unit."""
    from muster.cli.monitoring import registry_tables
    from muster.pipeline.history import tables

    of_registry = {name for table in registry_tables.TABLES.values() for name in table.row.__struct_fields__}
    definitions = tables.definitions().values()
    return of_registry | {column.name for definition in definitions for column in definition.columns}


def _with_spark(
    invocation: command.Invocation, location: str, query: str, rows: int | None, moment: Any
) -> tuple[Any, bool]:
    from muster.pipeline import spark as spark_

    with history.spark_session(invocation) as spark:
        spark_.register(spark, location, as_of=moment)
        table = spark_.query(spark, query, rows)
    truncated = rows is not None and table.num_rows > rows
    return table.slice(0, rows) if truncated else table, truncated


def _write(invocation: command.Invocation, table: Any, to: Path | None) -> None:
    from muster.pipeline.history import sql as sql_

    form = invocation.output
    if form in FILES:
        if form == "parquet" and to is None and sys.stdout.isatty():
            raise click.UsageError("Parquet is not text: write it to a file with --to")
        if to is None:
            write_table(table, form, sys.stdout.buffer)
            return
        with files.FileDraft(to, mode=files.requested_mode()) as draft:
            with draft.path.open("wb") as file:
                write_table(table, form, file)
            draft.publish()
    elif to is not None:
        import msgspec

        files.write(to, msgspec.json.encode(sql_.rows(table)), mode=files.requested_mode())
    else:
        output.Printer(form).rows(
            sql_.rows(table), table.column_names, empty="no rows", expands=True, measured=_stored_columns()
        )
        return
    invocation.printer.note(f"wrote {units.format_count(table.num_rows, 'row')} to {to}")


def write_table(table: Any, form: str, target: Any) -> None:
    """Write a table as CSV or Parquet. Nested values of CSV are JSON."""
    import pyarrow as pa

    from muster.core import errors

    try:
        if form == "parquet":
            import pyarrow.parquet as pq

            pq.write_table(table, target, compression="zstd")
            return
        import pyarrow.csv as pa_csv

        from muster.pipeline.history import export

        pa_csv.write_csv(export.flat(table), target)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise errors.InvalidInput(
            f"SQL: {form} has no type for a column of the result: {error}", hint="cast it to VARCHAR"
        ) from error
