"""The information service: metadata (contexts), with replicas near its readers.

Guaranteed: an acknowledged write is in the log of its context and is not lost.  Each context has one primary
at a time, and a write by a former primary fails.  Every reply states the version and the age of the value.
A watcher receives the changes of a context in order.

Not guaranteed: that a replica has the newest value (use ``max_staleness_s``), and any order between
different contexts.
"""
