"""Markup in which text is escaped and only markup is not. Pure.

    tag("td", name, cls="name")     →  Markup('<td class="name">&lt;b&gt;</td>')

Whatever comes from the domain is a plain string, and becomes text; there is no way to make markup of it but
to say so (`Markup`), which only this package does, with constants.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "path", "line", "circle", "rect", "polyline"})


class Markup(str):
    __slots__ = ()


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
    """``aria_label`` becomes aria-label; a trailing underscore goes; True is a bare attribute, None none."""
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
