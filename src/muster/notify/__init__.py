"""Selective notification: an event reaches exactly the receivers whose state, policy and trust conditions
hold.

Guaranteed: an event is delivered to a receiver if and only if its address is true of the receiver's state and
the receiver's policy is true of the event's content and the sender's attributes; a change that was
acknowledged applies to every event sent after it; restricted attributes (leading underscore) count only as
authorities granted them; durable events are matched once, and stored until acknowledged even if a notifier
dies. Not guaranteed: transient events to a receiver that is slow or disconnected (they are dropped and
counted), an order between events of different senders.
"""
