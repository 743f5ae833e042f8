"""Changes that the provider makes to a stored AMQP message: its destination, properties and expiry."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from typing import Final

from muster.message import destinations
from muster.message.amqp_format import amqp_types

DESTINATION: Final = "x-opt-jms-dest"
KINDS: Final = (  # by the annotation of the kind of a destination
    destinations.DestinationKind.QUEUE,
    destinations.DestinationKind.TOPIC,
    destinations.DestinationKind.TEMPORARY_QUEUE,
    destinations.DestinationKind.TEMPORARY_TOPIC,
)
_TO, _EXPIRY = 2, 8


def amend(
    amqp: str,
    *,
    to: destinations.Destination | None,
    added: Mapping[str, str] | None = None,
    removed: Collection[str] = (),
    expires: bool = True,
) -> str:
    """The sections in ``amqp`` (see `messages.MessageMeta.amqp`) with another address and other application
    properties, and without an expiry time unless it ``expires``. Everything else stays as it was sent.
    """
    data = base64.b64decode(amqp[1:])
    parts: dict[int, list[bytes]] = {}
    for code, at, _, end in amqp_types.split(data):
        parts.setdefault(code, []).append(data[at:end])
    if not expires and (header := _elements(parts, amqp_types.HEADER))[2:3]:
        header[2] = b"\x40"
        parts[amqp_types.HEADER] = [amqp_types.section(amqp_types.HEADER, amqp_types.sequence(header))]
    fields = _elements(parts, amqp_types.PROPERTIES)
    fields += [b"\x40"] * (_TO + 1 - len(fields))
    fields[_TO] = b"\x40" if to is None else amqp_types.text(to.name)
    if not expires and len(fields) > _EXPIRY:
        fields[_EXPIRY] = b"\x40"
    parts[amqp_types.PROPERTIES] = [amqp_types.section(amqp_types.PROPERTIES, amqp_types.sequence(fields))]
    destination = {} if to is None else {DESTINATION: bytes((0x51, KINDS.index(to.kind)))}
    _amend_map(parts, amqp_types.ANNOTATIONS, destination, (DESTINATION,), symbols=True)
    texts = {name: amqp_types.text(value) for name, value in (added or {}).items()}
    _amend_map(parts, amqp_types.APPLICATION, texts, (*texts, *removed))
    amended = b"".join(part for code in sorted(parts) for part in parts[code])
    return amqp[0] + base64.b64encode(amended).decode()


def _elements(parts: dict[int, list[bytes]], code: int) -> list[bytes]:
    if code not in parts:
        return []
    (section,) = parts[code]
    ((_, _, value, _),) = amqp_types.split(section)
    return amqp_types.elements(section, value)


def _amend_map(
    parts: dict[int, list[bytes]],
    code: int,
    added: Mapping[str, bytes],
    removed: Collection[str],
    *,
    symbols: bool = False,
) -> None:
    names = {amqp_types.text(name, symbol=symbol) for name in removed for symbol in (False, True)}
    before = _elements(parts, code)
    after = [
        part
        for key, value in zip(before[::2], before[1::2], strict=True)
        if key not in names
        for part in (key, value)
    ]
    for name, value in added.items():
        after += (amqp_types.text(name, symbol=symbols), value)
    if after != before:
        parts[code] = [amqp_types.section(code, amqp_types.encoded_map(after))] if after else []
