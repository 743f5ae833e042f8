"""The information service: metadata (contexts) kept near those who ask for it.

Promised: a write that was acknowledged stands in the context's log and is never lost; each context has one
primary at a time, and a deposed one's write fails; every answer says its version and its age; who follows a
context hears of its changes in order.  Not promised: that any copy is the newest (ask with
``max_staleness_s``), or order between different contexts.
"""
