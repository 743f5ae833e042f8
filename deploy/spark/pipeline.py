"""The pipeline as a program for spark-submit.

    muster pipeline options options.json
    spark-submit --master spark://HOST:7077 deploy/spark/pipeline.py options.json

PYSPARK_DRIVER_PYTHON names the Python of the driver, which has Muster installed.  Spark's settings on the
command line are those of the driver's Java process; those of the domain's settings (`pipeline.master`,
`pipeline.memory`, `pipeline.spark`) apply to the session.
"""

import sys

from muster.pipeline.job import main

sys.exit(main.main(sys.argv[1]))
