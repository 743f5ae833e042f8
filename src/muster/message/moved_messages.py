"""The headers of messages that the provider moves: dead letters, expired ones, and those moved by request."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from muster.message import destinations, messages
from muster.message.amqp_format import amqp_types, sections

_DEAD: Final = (messages.DEAD_REASON, messages.DEAD_FROM)
_DEAD_LETTERS: Final = str(destinations.queue(destinations.DEAD_LETTERS))


def to_dead_letter(meta: messages.MessageMeta, reason: str, origin: str) -> messages.MessageMeta:
    """The header of a message that moves to the queue of dead letters, where it does not expire."""
    added = {messages.DEAD_REASON: reason, messages.DEAD_FROM: origin}
    made = msgspec.structs.replace(
        meta, expiration_ms=0, destination=None, properties=meta.properties | added
    )
    _amend(made, to=None, added=added, expires=False)
    return made


def correct(meta: messages.MessageMeta, to: str) -> bool:
    """Correct what a client states about the destination of its message; False if it is correct.

    A dead letter is moved back to where its header says that it came from, with the rights of the one who
    moves it: a sender must not choose another destination. Only those who may send to the queue of dead
    letters, which is granted by name, can make dead letters.
    """
    is_wrong = meta.destination not in (None, to)
    if is_wrong:
        meta.destination = to
    if messages.DEAD_FROM in meta.properties and to != _DEAD_LETTERS:
        meta.properties = {name: value for name, value in meta.properties.items() if name not in _DEAD}
        _amend(meta, to=destinations.Destination.parse(to), removed=_DEAD)
        is_wrong = True
    return is_wrong


def moved(meta: messages.MessageMeta, to: str) -> messages.MessageMeta:
    """The header of a message that moves to another destination."""
    destination = destinations.Destination.parse(to)
    properties = {name: value for name, value in meta.properties.items() if name not in _DEAD}
    made = msgspec.structs.replace(meta, destination=to, properties=properties)
    _amend(made, to=destination, removed=_DEAD)
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
