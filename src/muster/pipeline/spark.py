"""The history and the streams in a Spark session of your own.

    from pyspark.sql import SparkSession
    from muster.pipeline import spark as muster_spark

    spark = SparkSession.builder.getOrCreate()
    muster_spark.register(spark, "/var/lib/muster/history")
    spark.sql("SELECT zone, avg(cpu_percent) FROM nodes WHERE day = current_date() GROUP BY zone").show()

`register` sends Muster's code to the executors of a cluster, registers the source ``muster`` and, with a
history, creates a temporary view for each table.  A view shows the table at the time of the call; to see
newer rows, call it again.  No connector is needed: the log of the table names its Parquet files, and Spark
reads them with partition pruning and predicate push-down.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pyarrow as pa

from muster.core import errors
from muster.pipeline.history import delta, sql, storage, tables
from muster.pipeline.source import spark_internals

LAST_MS = 253_402_300_799_999  # the end of the year 9999

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

R = TypeVar("R", bound=msgspec.Struct)


def register(
    spark: SparkSession,
    history: storage.Root | None = None,
    *,
    as_of: datetime.datetime | int | None = None,
) -> list[str]:
    """Register the data source ``muster``, and create the views of a history. The names of the views."""
    from muster.pipeline.source import data_source, session

    if not session.is_local(str(spark.sparkContext.master)):
        session.send_code(spark)
    data_source.register(spark)
    made: list[str] = []
    if history is None:
        return made
    for name in tables.definitions():
        try:
            frame = read(spark, history, name, as_of=as_of)
        except errors.NotFound:
            continue
        frame.createOrReplaceTempView(name)
        made.append(name)
    if tables.ALERTS in made:
        shown = ", ".join(f"`{column.name}`" for column in tables.definition(tables.ALERTS).columns)
        current = spark.sql(tables.CURRENT_SQL.format(columns=shown, alerts=tables.ALERTS))
        current.createOrReplaceTempView(tables.ALERTS_CURRENT)
        made.append(tables.ALERTS_CURRENT)
    if not made:
        raise errors.NotFound(
            f"there is no history in {storage.join(history)}", hint="`muster run pipeline` writes it"
        )
    return made


def read(
    spark: SparkSession,
    history: storage.Root,
    name: str,
    *,
    from_ms: int | None = None,
    to_ms: int | None = None,
    as_of: datetime.datetime | int | None = None,
) -> DataFrame:
    """A table as a DataFrame, restricted to a period of event time. `errors.NotFound` if there is none."""
    from pyspark.sql.pandas.types import from_arrow_schema

    snapshot = delta.Snapshot(history, name, as_of=as_of)
    fields = [field.with_nullable(True) for field in snapshot.schema]
    schema = from_arrow_schema(pa.schema(fields))
    root = storage.spark_url(history, name)
    paths = [f"{root}/{file.path}" for file in snapshot.files_between(from_ms, to_ms)]
    if not paths:
        return spark.createDataFrame([], schema)
    frame = spark.read.schema(schema).option("basePath", root).parquet(*paths)
    for bound_ms, comparison, last in ((from_ms, ">=", False), (to_ms, "<", True)):
        if bound_ms is not None:
            bound_ms = max(0, min(bound_ms, LAST_MS))
            day = datetime.datetime.fromtimestamp(bound_ms / 1000, datetime.UTC).date()
            frame = frame.where(f"{tables.DAY} {'<=' if last else '>='} DATE '{day}'")
            frame = frame.where(f"{snapshot.time} {comparison} timestamp_millis({bound_ms})")
    return frame


def collect(frame: DataFrame, kind: type[R]) -> list[R]:
    """The rows, whose columns have the names of the fields."""
    return [kind(*(row[name] for name in kind.__struct_fields__)) for row in frame.collect()]


def query(spark: SparkSession, text: str, rows: int | None) -> pa.Table:
    """The result of a SELECT over the registered views; one row more than ``rows`` if there are more."""
    from pyspark.errors import AnalysisException, ParseException

    try:
        if not spark_internals.is_select(spark, text):
            raise errors.InvalidInput(sql.NOT_A_SELECT, hint=sql.READ_ONLY)
        frame = spark.sql(text)
        if rows is not None:
            frame = frame.limit(rows + 1)
        return sql.with_unique_names(frame.toArrow())
    except (AnalysisException, ParseException) as error:
        raise errors.InvalidInput(f"SQL: {str(error).splitlines()[0]}") from error
