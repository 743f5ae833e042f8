"""The in-memory twin of the bus: the same words over a simulated network, for tests and simulation.

- `network`: links, delay, loss, duplication, reordering, partition; who hears what.
- `connection`: the bus as one identity has it; `streams`: its handles on what lasts.
- `storage`: what streams hold. Plain data and rules.

Promised: what the contract suite promises of both; and that one seed is one run, in virtual time.  Not here:
permissions, TLS, several brokers, elections, group commit (this storage takes no time of its own).
"""
