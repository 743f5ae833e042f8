"""A batch job: the machines whose disks grew most in a week, as CSV.

spark-submit examples/spark_batch.py ~/.muster/history growth
"""

import sys

from pyspark.sql import SparkSession

from muster.pipeline import spark as muster_spark

history, result = sys.argv[1:]
spark = SparkSession.builder.appName("growth of disks").getOrCreate()
muster_spark.register(spark, history)
growth = spark.sql("""
    SELECT machine, max_by(disk_percent, reported_at) - min_by(disk_percent, reported_at) AS points
    FROM nodes WHERE day >= current_date() - 7 GROUP BY machine ORDER BY points DESC LIMIT 20
""")
growth.write.mode("overwrite").csv(result, header=True)
