"""Owned logs: the state of a service as records on a stream, with one owner at a time.

`pages` is the format, `journal` decides (pure), `owned_log` stores, reads and follows. A service keeps its
state in memory, changes it by appending records, and applies what is stored; a standby follows the pages.

Guaranteed: an append that returned is stored as the stream stores (synced, or on a quorum), whole, and once
for each request id; a former owner cannot append after the first page of its successor. Not guaranteed:
the order of appends that were not awaited one after the other.
"""
