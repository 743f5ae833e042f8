"""What a client says of the ends of its links: capabilities, filters, addresses."""

from __future__ import annotations

from typing import Any, Final

import proton

_SELECTOR: Final = ("apache.org:selector-filter:string", str(0x0000468C00000004))
_NO_LOCAL: Final = ("apache.org:no-local-filter:list", str(0x0000468C00000003))


def _object(data: Any) -> Any:
    data.rewind()
    return data.get_object() if data.next() else None


def symbols(data: Any) -> frozenset[str]:
    found = _object(data)
    if isinstance(found, proton.Array):
        found = list(found.elements)
    if found is None:
        return frozenset()
    return frozenset(map(str, found if isinstance(found, list) else [found]))


def filters(data: Any) -> tuple[str | None, bool]:
    """Selector and no-local."""
    selector, no_local = None, False
    for name, value in (_object(data) or {}).items():
        said = getattr(value, "descriptor", "")
        descriptor = str(int(said)) if isinstance(said, int) else str(said)
        if descriptor in _SELECTOR:
            selector = str(value.value)
        elif descriptor in _NO_LOCAL or name == "no-local":
            no_local = True
    return selector, no_local
