"""The source and target of a link: capabilities and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import proton

_SELECTOR: Final = ("apache.org:selector-filter:string", str(0x0000468C00000004))
_DELETE_ON_CLOSE: Final = proton.ulong(0x2B)
_OUTCOMES: Final = tuple(f"amqp:{name}:list" for name in ("accepted", "rejected", "released", "modified"))
_NO_LOCAL: Final = ("apache.org:no-local-filter:list", str(0x0000468C00000003))


def _object(data: Any) -> Any:
    data.rewind()
    return data.get_object() if data.next() else None


def symbols(data: Any) -> frozenset[str]:
    value = _object(data)
    if isinstance(value, proton.Array):
        value = list(value.elements)
    if value is None:
        return frozenset()
    return frozenset(map(str, value if isinstance(value, list) else [value]))


@dataclass(slots=True)
class Filters:
    """The filters of a source. ``applied``: those that the gateway knows, as the client wrote them."""

    selector: str | None = None
    no_local: bool = False
    applied: dict[Any, Any] = field(default_factory=dict)


def filters(data: Any, *, topic: bool) -> Filters:
    """No-local applies to a ``topic`` only."""
    read = Filters()
    for name, value in (_object(data) or {}).items():
        raw = getattr(value, "descriptor", "")
        descriptor = str(int(raw)) if isinstance(raw, int) else str(raw)
        if descriptor in _SELECTOR:
            read.selector = str(value.value)
        elif topic and (descriptor in _NO_LOCAL or name == "no-local"):
            read.no_local = True
        else:
            continue
        read.applied[name] = value
    return read


def set_lifetime(data: Any) -> None:
    """State the lifetime of a temporary destination, whatever the client requested."""
    data.clear()
    data.put_object({proton.symbol("lifetime-policy"): proton.Described(_DELETE_ON_CLOSE, [])})


def set_symbols(data: Any, names: Sequence[str]) -> None:
    data.clear()
    data.put_object(proton.Array(proton.UNDESCRIBED, proton.Data.SYMBOL, *map(proton.symbol, names)))


def set_outcomes(data: Any) -> None:
    """State the outcomes that a message may have, if the client does not limit them."""
    if _object(data) is None:
        set_symbols(data, _OUTCOMES)


def set_filters(data: Any, applied: dict[Any, Any]) -> None:
    """State the filters that are in effect: a client recognises by their absence that others are not."""
    data.clear()
    if applied:
        data.put_object(applied)
