"""The data pipeline: Spark Structured Streaming at the root of the monitoring hierarchy.

It reads the stream of reports, rolls them up over event-time windows, watches every machine, raises alerts,
writes the history and publishes results back to the bus.  It promises that the history holds every report
that was stored, once, and that each result is on the bus once, whenever its process is killed; that no
report, however odd, stops it; and that what it refuses is counted by reason.  It does not promise that a
notice to people arrives only once, nor to notice its own absence: look at its progress.

The only folder that imports ``pyspark``, and only `format`, `source` and `sink` do when they are imported.
It needs Java 17 or 21 (`java`); everything else in Muster works without it.
"""
