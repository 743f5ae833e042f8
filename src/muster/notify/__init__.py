"""Selective notification: an event reaches exactly those whose state, policy and trust all agree.

Promised: an event is delivered to a party if and only if its address is true of the party's state and the
party's policy is true of the event's content and the sender's attributes; a change that was acknowledged
holds for every event sent after it; restricted attributes (leading underscore) count only as authorities
granted them; durable events are matched once, and kept until acknowledged across the death of a notifier.
Not promised: transient events to a party that is slow or away (they are dropped and counted), an order
between events of different senders.
"""
