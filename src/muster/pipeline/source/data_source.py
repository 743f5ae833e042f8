"""Muster as a Spark data source and sink, ``format("muster")``: streams of the bus, and with the option
``history`` its tables.

Spark imports this module when it starts: what a query needs is imported with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader

from muster.core import errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from muster.pipeline.source import reader as source_reader
    from muster.pipeline.source import writer


class MusterDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "muster"

    def schema(self) -> StructType:
        from pyspark.sql.pandas.types import from_arrow_schema

        from muster.pipeline.source import reader, rows, shard_keys, table_reader

        if "history" in self.options:
            return table_reader.schema_of(self.options)
        payload = self.options.get("payload", reader.REPORTS)
        if payload == reader.SHARDS:
            return from_arrow_schema(shard_keys.SCHEMA)
        return rows.spark_schema(rows.SCHEMAS.get(payload, {}))  # an unknown one fails in the reader

    def reader(self, schema: StructType) -> DataSourceReader:
        from muster.pipeline.source import reader, table_reader

        if "history" in self.options:
            return table_reader.TableReader(self.options, schema)
        return reader.BusBatchReader(self.options, schema)

    def streamReader(self, schema: StructType) -> source_reader.BusStreamReader:
        from muster.pipeline.source import reader

        if "history" in self.options:
            raise errors.InvalidInput("a table of the history is no stream", hint="use spark.read")
        return reader.BusStreamReader(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> writer.BusStreamWriter:
        from muster.pipeline.source import writer

        return writer.BusStreamWriter(self.options, schema)


def register(session: SparkSession) -> None:
    """Unless Spark has found it by itself (the package ``pyspark_muster``)."""
    from pyspark.errors import AnalysisException

    try:
        session.dataSource.register(MusterDataSource)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
