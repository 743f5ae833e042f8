"""HTML markup with escaped text. Pure.

    tag("td", name, cls="name")     →  Markup('<td class="name">&lt;b&gt;</td>')

Data of the domain is a plain string and is escaped.  Only `Markup` is not escaped, and only this package
creates it, from constants.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "path", "line", "circle", "rect", "polyline"})


class Markup(str):
    __slots__ = ()

    def __html__(self) -> str:
        """Templates insert it as it is."""
        return str(self)


NOTHING = Markup("")

Child = Markup | str | int | float | None | Iterable["Child"]
Value = str | int | float | bool | None


def text(child: Child) -> str:
    match child:
        case None:
            return ""
        case Markup():
            return child
        case str():
            return escape(child, quote=True)
        case int() | float():
            return escape(str(child))
    return "".join(map(text, child))


def join(*children: Child) -> Markup:
    return Markup("".join(map(text, children)))


def tag(name: str, /, *children: Child, cls: str = "", **attributes: Value) -> Markup:
    """An element. ``aria_label`` becomes aria-label; a trailing underscore is removed; True is an attribute
    without a value; None omits the attribute."""
    parts = [name]
    if cls:
        parts.append(f'class="{escape(cls)}"')
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(key)
        elif value is not None and value is not False:
            parts.append(f'{key}="{escape(str(value))}"')
    head = " ".join(parts)
    if name in VOID and not children:
        return (
            Markup(f"<{head}>")
            if name not in ("path", "line", "circle", "rect", "polyline")
            else Markup(f"<{head}/>")
        )
    return Markup(f"<{head}>{''.join(map(text, children))}</{name}>")
