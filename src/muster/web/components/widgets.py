"""Widgets: badges, tables, tiles, fields, buttons. Pure."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.core import units
from muster.web.components import html, page
from muster.web.components.html import Child, Markup, join, tag

#: The style of a state; others are neutral.
TONES = {
    "up": "good",
    "running": "good",
    "done": "good",
    "connected": "good",
    "resolved": "good",
    "starting": "busy",
    "draining": "busy",
    "pending": "busy",
    "decided": "busy",
    "acknowledged": "busy",
    "late": "warn",
    "stale": "warn",
    "unknown": "warn",
    "warning": "warn",
    "in-doubt": "warn",
    "refused": "warn",
    "silenced": "calm",
    "info": "calm",
    "holds": "good",
    "fails": "bad",
    "primary": "good",
    "permanent": "busy",
    "completed": "good",
    "down": "bad",
    "failed": "bad",
    "firing": "bad",
    "critical": "bad",
}


WORD_MAX = 24


def severity_class(state: str) -> str:
    return TONES.get(state, "calm")


def badge(state: str) -> Markup:
    """A state as text with a mark; the colour is not the only distinction."""
    return tag("span", state, cls=f"badge {severity_class(state)}")


def empty(what: str, hint: Child = "") -> Markup:
    return tag("div", tag("p", what), tag("p", hint, cls="hint") if hint else None, cls="empty")


def problem(what: str, hint: str | None) -> Markup:
    """An error message; text in backquotes is shown as a command."""
    advice = tag("p", _quoting(_sentence(hint)), cls="hint") if hint else None
    return tag("div", tag("p", _quoting(_sentence(what))), advice, cls="problem", role="note")


def _sentence(message: str) -> str:
    """The messages of errors begin with a small letter, as the command line shows them after ``error:``."""
    return message[:1].upper() + message[1:]


def _quoting(text: str) -> Markup:
    parts = re.split("`([^`]*)`", text)
    return join(*(tag("code", part) if place % 2 else part for place, part in enumerate(parts)))


def table(head: Sequence[str], rows: Sequence[Sequence[Child]], *, label: str, none: Child = "") -> Markup:
    """Numbers are aligned to the right. A heading that begins with ``#`` marks a column of numbers."""
    if not rows:
        return none if isinstance(none, Markup) else empty(html.text(none) or "No data yet.")
    numeric = [name.startswith("#") for name in head]
    top = [
        tag("th", name.removeprefix("#"), scope="col", cls="num" if right else "") if name else tag("td", "")
        for name, right in zip(head, numeric, strict=True)
    ]
    body = [
        tag(
            "tr", *(tag("td", cell, cls=_look(cell, right)) for cell, right in zip(row, numeric, strict=True))
        )
        for row in rows
    ]
    made = tag("table", tag("thead", tag("tr", *top)), tag("tbody", *body))
    return tag("div", made, cls="scroll", tabindex=0, role="region", aria_label=label)


def _look(cell: Child, right: bool) -> str:
    """Short names are not wrapped at hyphens, and sentences get a wide column; badges, times and links have
    the width of their content."""
    if right or not isinstance(cell, str) or isinstance(cell, Markup):
        return "num" if right else ""
    return "word" if len(cell) <= WORD_MAX and " " not in cell else "text"


def facts(pairs: Mapping[str, Child]) -> Markup:
    return tag("dl", *(join(tag("dt", name), tag("dd", value)) for name, value in pairs.items()), cls="facts")


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure with its meaning; ``look``: a style, as of a state."""

    label: str
    value: str
    note: str = ""
    look: str = ""
    href: str = ""


def link(label: str, path: str, **query: str | int | None) -> Markup:
    return tag("a", label, href=page.link_to(path, **query))


def more_link(label: str, href: str) -> Markup:
    return tag("p", tag("a", label, href=href), cls="more")


def count(number: int, singular: str, many: str = "") -> str:
    """``1 channel``, ``2 channels``."""
    return f"{number:,} {singular if number == 1 else many or singular + 's'}"


def number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def measurement(value: float | None) -> str:
    """A value of unknown unit: 150, 99.17."""
    return number(value, 0 if value is None or float(value).is_integer() else 2)


def rate(per_s: float) -> str:
    """A number of events a second; a slow rate is not shown as none."""
    return f"{per_s:,.0f}/s" if not per_s or per_s >= 9.95 else f"{per_s:.2g}/s"


def percent(value: float | None) -> str:
    return "–" if value is None else units.rounded_percent(value)


def seconds(value: float | None) -> str:
    return "–" if value is None else units.rounded_duration(value)


def size(value: float | None) -> str:
    return "–" if value is None else units.rounded_size(value)


def moment(at_ms: int | None) -> Markup:
    """A time: short as text, complete in the attributes."""
    if not at_ms:
        return Markup("–")
    try:
        at = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
    except (ValueError, OverflowError):
        # Clients state times: one that no calendar has must not hide the rest.
        return tag("span", f"{at_ms} ms")
    today = time.time() - at_ms / 1000 < 43_200
    shown = at.strftime("%H:%M:%S") if today else at.strftime("%Y-%m-%d %H:%M")
    return tag(
        "time", shown, datetime=at.isoformat(timespec="milliseconds"), title=f"{at:%Y-%m-%d %H:%M:%S} UTC"
    )


def relative_time(at_ms: int | None) -> str:
    return "–" if not at_ms else f"{seconds(max(0, int(time.time() - at_ms / 1000)))} ago"


def field(
    label: str,
    name: str,
    value: str = "",
    *,
    kind: str = "text",
    placeholder: str = "",
    required: bool = False,
    options: Sequence[tuple[str, str]] = (),
    rows: int = 0,
    hint: str = "",
    auto: str = "",
) -> Markup:
    """A form field with a label."""
    id = f"f-{name}"
    attributes: dict[str, Any] = {"id": id, "name": name, "required": required or None}
    if auto:
        attributes["autocomplete"] = auto
    if options:
        control = tag(
            "select",
            *(tag("option", shown, value=own, selected=own == value or None) for own, shown in options),
            **attributes,
        )
    elif rows:
        text = f"\n{value}"  # a browser omits the first line break
        control = tag("textarea", text, rows=rows, spellcheck="false", placeholder=placeholder, **attributes)
    else:
        control = tag(
            "input", type=kind, value=value, spellcheck="false", placeholder=placeholder, **attributes
        )
    return tag(
        "div",
        tag("label", label, for_=id),
        control,
        tag("p", hint, cls="hint") if hint else None,
        cls="field",
    )


def search(path: str, *fields: Markup, button: str = "Show", **kept: str) -> Markup:
    hidden = [tag("input", type="hidden", name=name, value=value) for name, value in kept.items() if value]
    return tag(
        "form",
        *hidden,
        *fields,
        tag("button", button, type="submit"),
        method="get",
        action=path,
        cls="bar",
        role="search",
    )


def action_button(
    request: page.PageRequest,
    what: str,
    button: str,
    *fields: Markup,
    sure: str = "",
    look: str = "",
    **values: str | int,
) -> Markup:
    """A button that runs an operation; empty if the person's role does not permit it."""
    if not request.may_act:
        return Markup("")
    hidden = {**values, "form": request.form_token, "back": request.here}
    return tag(
        "form",
        *(tag("input", type="hidden", name=name, value=value) for name, value in hidden.items()),
        *fields,
        tag("button", button, type="submit", cls=look),
        method="post",
        action=f"/do/{what}",
        cls="act" if not fields else "act stacked",
        data_sure=sure or None,
    )


def pages(
    request: page.PageRequest, next_: str | int | None, *, total: int | None = None, shown: int = 0
) -> Markup:
    """The navigation of a paginated list."""
    if not shown and not request.parameter("after") and next_ is None:
        return Markup("")
    summary = f"{shown:,} of {total:,} shown" if total is not None else f"{shown:,} shown"
    query = {name: value for name, value in request.query.items() if name != "after"}
    first = (
        tag("a", "First", href=page.link_to(request.path, **query)) if request.parameter("after") else None
    )
    following = (
        tag("a", "Next", href=page.link_to(request.path, **{**query, "after": str(next_)}), rel="next")
        if next_ is not None
        else None
    )
    return tag("nav", tag("span", summary), first, following, cls="pages", aria_label="Pages")
