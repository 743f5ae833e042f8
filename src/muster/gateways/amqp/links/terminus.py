"""The source and target of a link: capabilities and filters."""

from __future__ import annotations

from typing import Any, Final

import proton

_SELECTOR: Final = ("apache.org:selector-filter:string", str(0x0000468C00000004))
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


def filters(data: Any) -> tuple[str | None, bool]:
    """The selector, and whether no-local is set."""
    selector, no_local = None, False
    for name, value in (_object(data) or {}).items():
        raw = getattr(value, "descriptor", "")
        descriptor = str(int(raw)) if isinstance(raw, int) else str(raw)
        if descriptor in _SELECTOR:
            selector = str(value.value)
        elif descriptor in _NO_LOCAL or name == "no-local":
            no_local = True
    return selector, no_local
