"""JMS on the bus: connections, sessions, messages, selectors, durable subscriptions, queues.

Promised: a persistent message that was accepted, and an acknowledgement that was confirmed, survive the
death of any process; a commit happens as a whole or not at all; what may have been delivered before comes
again marked as redelivered.  Not promised: priorities and selectors of a queue look no further than its
window; delivery counts are exact only while one dispatcher lives; distributed (XA) transactions are not
offered.

Non-persistent messages of topics go straight through the bus (`client`).  All else goes through the one
dispatcher of the domain's log (`service`), which decides with `ledger`, `backlog` and `selectors`, all pure.
"""
