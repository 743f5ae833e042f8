"""JMS on the bus: connections, sessions, messages, selectors, durable subscriptions, queues.

Guarantees: an accepted persistent message and a confirmed acknowledgement survive the failure of any process.
A commit is atomic. A message that may have been delivered before is marked as redelivered.

Priorities, selectors and groups apply to all messages of a queue. Delivery counts are exact only while the
same dispatcher runs. Distributed (XA) transactions are not supported.

Non-persistent topic messages go directly through the bus (`client`). Everything else goes through the one
dispatcher that owns the domain's log (`dispatcher`). Its decisions are made in `log.ledger`, `backlog` and
`selectors`, which do no I/O.
"""
