"""Monitoring: sensors, channels, reports in Arrow and XML, the capacity model.

Guaranteed: a report is counted once, however often it is sent and through whichever channels, if the copies
meet in one channel or within the pipeline's window; dropped reports are counted by reason; an incomplete
aggregate is marked as partial; no message stops a channel. Not guaranteed: delivery of a single
report.  Reports are not durable before a channel without a parent has forwarded them; a sensor that is
disconnected buffers them on disk, within a bound.
"""
