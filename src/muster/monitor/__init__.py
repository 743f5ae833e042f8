"""The whole fleet as one report: sensors, channels, reports in Arrow and XML, the analytic model.

Promised: a report is counted once, however often it is sent and whichever channel it comes through, where
two copies meet in one channel or within the pipeline's window; what is dropped is counted by reason; an
aggregate from which something is missing says so; nothing that arrives stops a channel.
Not promised: that a single report arrives.  Reports are not durable before the first forward of a channel
without a parent; a sensor that knows it is cut off buffers on disk, within a bound.
"""
