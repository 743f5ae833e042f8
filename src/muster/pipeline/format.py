"""The bus as a format of Spark: register `Muster`, then ``format("muster")`` both ways."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from muster.core import errors
from muster.pipeline import opening, sink, source


class Muster(DataSource):
    @classmethod
    def name(cls) -> str:
        return "muster"

    def schema(self) -> str:
        if self.options.get("payload", "raw") == "arrow":
            raise errors.InvalidInput("payload=arrow needs the columns: readStream.format(…).schema(…)")
        if self.options.get("payload") == "shards":
            return opening.COLUMNS
        return source.RAW_SCHEMA

    def reader(self, schema: StructType) -> source.Reader:
        return source.Reader(self.options, schema)

    def streamReader(self, schema: StructType) -> source.StreamReader:
        return source.StreamReader(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> sink.StreamWriter:
        return sink.StreamWriter(self.options, schema)
