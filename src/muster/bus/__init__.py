"""The messaging layer: publish, subscribe, request, gather, streams, key/value, leases; and the brokers.

The only folder that imports ``nats``. Callers use the interface of `muster.bus.api` and nothing of NATS.
Guaranteed: data that a stream or key/value bucket acknowledged is synced or replicated; the queues of slow
consumers are bounded and counted. Not guaranteed: delivery of plain publishes to disconnected subscribers,
order across subjects.
"""
