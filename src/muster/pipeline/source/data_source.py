"""The bus as a Spark data source and sink: register `MusterDataSource`, then ``format("muster")``."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from muster.pipeline.source import reader as source_reader
from muster.pipeline.source import rows, shard_keys, writer


class MusterDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "muster"

    def schema(self) -> StructType | str:
        payload = self.options.get("payload", source_reader.REPORTS)
        if payload == source_reader.SHARDS:
            return shard_keys.COLUMNS
        return rows.spark_schema(rows.SCHEMAS.get(payload, {}))  # an unknown one fails in the reader

    def reader(self, schema: StructType) -> source_reader.BusBatchReader:
        return source_reader.BusBatchReader(self.options, schema)

    def streamReader(self, schema: StructType) -> source_reader.BusStreamReader:
        return source_reader.BusStreamReader(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> writer.BusStreamWriter:
        return writer.BusStreamWriter(self.options, schema)
