"""The road: publish, subscribe, request, gather, streams, key/value, leases; and the brokers themselves.

The only folder that imports ``nats``.  Callers see the words of `muster.bus.api` and nothing of the engine.
Promised: what a stream or key/value acknowledged is synced or replicated; slow consumers are bounded and
counted.  Not promised: delivery of plain publishes to subscribers that are away, order across subjects.
"""
