"""The data pipeline: Spark Structured Streaming at the root of the monitoring hierarchy.

It reads the stream of reports, aggregates them over event-time windows, tracks every machine, raises alerts,
writes the history and publishes results on the bus.

Guaranteed, even if the process is killed at any time: the history holds every stored report once; each result
is published once; no report, however malformed, stops the pipeline; rejected reports are counted by reason.
Not guaranteed: a notification to a contact may arrive twice, and the pipeline does not detect its own
absence: monitor its progress.

This and `muster.analyses` are the only folders that import ``pyspark``, and only `source.data_source`,
`source.reader` and `source.writer` do so at import time.  The pipeline needs Java 17 or 21
(`source.java_runtime`); the rest of Muster does not.
"""
