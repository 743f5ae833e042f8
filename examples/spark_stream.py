"""A streaming job: the load of each zone in each minute, as Parquet.

spark-submit examples/spark_stream.py nats://127.0.0.1:4222 lab.creds load
"""

import sys

from pyspark.sql import SparkSession, functions

from muster.pipeline import spark as muster_spark

servers, credentials, folder = sys.argv[1:]
spark = SparkSession.builder.appName("load of zones").getOrCreate()
muster_spark.register(spark)
source = spark.readStream.format("muster").options(servers=servers, credentials=credentials)
load = (
    source.option("payload", "metrics")
    .load()
    .where("metric = 'cpu_percent'")
    .withWatermark("reported_at", "1 minute")
    .groupBy(functions.window("reported_at", "1 minute"), "zone")
    .agg(functions.avg("value").alias("cpu_percent"), functions.max("value").alias("highest"))
)
sink = load.writeStream.format("parquet").option("checkpointLocation", f"{folder}/checkpoint")
sink.start(f"{folder}/load").awaitTermination()
