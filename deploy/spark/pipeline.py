"""The pipeline as a program for spark-submit, with the options of `muster run pipeline`.

    spark-submit --master spark://HOST:7077 deploy/spark/pipeline.py --creds pipeline.creds --ca ca.pem

PYSPARK_DRIVER_PYTHON names the Python of the driver, which has Muster installed.  Spark's settings on the
command line are those of the driver's Java process; those of Muster's settings (`pipeline.master`,
`pipeline.memory`, `pipeline.spark`) apply to the session.
"""

import sys

from muster.cli import main

sys.exit(main.call(["run", "pipeline", *sys.argv[1:]]))
