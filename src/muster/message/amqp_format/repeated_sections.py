"""The header and the annotations of an AMQP message.

The messages of a client have few different ones, so short sections are decoded once.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

from muster.message import values
from muster.message.amqp_format import amqp_types, sections

REPLY: Final = "x-opt-jms-reply-to"
TYPE: Final = "x-opt-jms-msg-type"
DUE: Final = "x-opt-delivery-time"
_SECTIONS_MAX: Final = 1024
_SECTION_BYTES_MAX: Final = 128  # clients choose the size of a section: together, they must stay small


class HeaderFields(NamedTuple):
    """As they were sent: ``priority`` and ``ttl_ms`` may have a type that is not valid."""

    persistent: bool = False
    priority: Any = None
    ttl_ms: Any = None


class JmsAnnotations(NamedTuple):
    """``destination`` and ``reply_to``: see `sections.KINDS`."""

    type: int | None = None
    destination: int | None = None
    reply_to: int | None = None
    delivery_time_ms: int | None = None


NO_HEADER: Final = HeaderFields()
NO_ANNOTATIONS: Final = JmsAnnotations()


def header_fields(value: bytes) -> HeaderFields:
    return (_cached_header if len(value) <= _SECTION_BYTES_MAX else _read_header)(value)


def jms_annotations(value: bytes) -> JmsAnnotations:
    return (_cached_annotations if len(value) <= _SECTION_BYTES_MAX else _read_annotations)(value)


def _read_header(value: bytes) -> HeaderFields:
    persistent, priority, ttl_ms = (*amqp_types.plain_fields(value, 0), None, None, None)[:3]
    return HeaderFields(bool(persistent), priority, ttl_ms)


def _read_annotations(value: bytes) -> JmsAnnotations:
    items = amqp_types.entries(value, 0)
    return JmsAnnotations(*(_int(items.get(name)) for name in (TYPE, sections.DESTINATION, REPLY, DUE)))


def _int(item: Any) -> int | None:
    plain = item.value if isinstance(item, values.TypedValue) else None
    return plain if type(plain) is int else None


_cached_header: Final = functools.lru_cache(_SECTIONS_MAX)(_read_header)
_cached_annotations: Final = functools.lru_cache(_SECTIONS_MAX)(_read_annotations)
