"""The data pipeline: Spark Structured Streaming at the root of the monitoring hierarchy.

The only folder that imports ``pyspark``.  It reads streams of the bus, rolls reports up, raises alerts,
writes history, and publishes results back.  It needs Java 17 or 21 (`java`); everything else in Muster
works without it.
"""
