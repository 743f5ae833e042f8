"""The simulated bus: the same interface over a simulated network, for tests and simulation.

- `network`: links, delay, loss, duplication, reordering, partition, and subscriptions.
- `connection`: the bus of one identity; `streams`: its handles on streams and buckets.
- `storage`: the content of streams. Plain data and rules.

Guaranteed: what the contract suite guarantees for both implementations, and that one seed is one run, in
virtual time. Not simulated: permissions, TLS, several brokers, elections, group commit (this storage takes no
time).
"""
