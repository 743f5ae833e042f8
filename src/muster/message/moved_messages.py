"""The headers of messages that the provider moves: dead letters, expired ones, and those moved by request."""

from __future__ import annotations

from typing import Any

import msgspec

from muster.message import destinations, messages
from muster.message.amqp_format import amqp_types, sections


def to_dead_letter(meta: messages.MessageMeta, reason: str, origin: str) -> messages.MessageMeta:
    """The header of a message that moves to the queue of dead letters, where it does not expire."""
    added = {messages.DEAD_REASON: reason, messages.DEAD_FROM: origin}
    made = msgspec.structs.replace(
        meta, expiration_ms=0, destination=None, properties=meta.properties | added
    )
    _amend(made, to=None, added=added, expires=False)
    return made


def moved(meta: messages.MessageMeta, to: str) -> messages.MessageMeta:
    """The header of a message that moves to another destination."""
    gone = (messages.DEAD_REASON, messages.DEAD_FROM)
    destination = destinations.Destination.parse(to)
    properties = {name: value for name, value in meta.properties.items() if name not in gone}
    made = msgspec.structs.replace(meta, destination=to, mark=None, properties=properties)
    _amend(made, to=destination, removed=gone)
    return made


def _amend(meta: messages.MessageMeta, **changes: Any) -> None:
    """Change the AMQP sections as well. Malformed ones, which any client may have written, are dropped."""
    if meta.amqp is None:
        return
    try:
        meta.amqp = sections.amend(meta.amqp, **changes)
    except amqp_types.MALFORMED:
        meta.amqp = None
        meta.kind = "b" if meta.kind == messages.AMQP_SECTIONS else meta.kind
