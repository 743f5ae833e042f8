"""Pages: the request (person, path, parameters) and the sections of a page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from muster.web import request_state
from muster.web.auth import sessions
from muster.web.components import html

PARAMETER_MAX = 4096


@dataclass(frozen=True, slots=True)
class PageRequest:
    web: request_state.WebState
    person: sessions.LoginSession
    path: str
    query: Mapping[str, str]
    form_token: str

    def parameter(self, name: str, default: str = "") -> str:
        return self.query.get(name, default)[:PARAMETER_MAX]

    @property
    def may_act(self) -> bool:
        return self.person.role.covers(sessions.WebRole.OPERATOR)

    @property
    def administers(self) -> bool:
        return self.person.role.covers(sessions.WebRole.ADMIN)

    @property
    def here(self) -> str:
        return link_to(self.path, **{name: text for name, text in self.query.items() if name != "manifest"})


Make = Callable[[], Awaitable[html.Markup]]


@dataclass(frozen=True, slots=True)
class PageSection:
    """Rendered again when data with one of its ``tags`` changes, and every ``every_s``."""

    id: str
    title: str
    make: Make
    tags: tuple[str, ...] = ()
    every_s: float = 5.0
    wide: bool = True


@dataclass(frozen=True, slots=True)
class DashboardPage:
    """``head`` is not updated while the page is open, so that input in its forms is not lost."""

    title: str
    sections: tuple[PageSection, ...] = ()
    lead: str = ""
    head: html.Markup = html.NOTHING
    foot: html.Markup = html.NOTHING

    @property
    def has_charts(self) -> bool:
        """Whether the page has a shared range of time."""
        return any(section.id.startswith("plot-") for section in self.sections)

    @property
    def has_map(self) -> bool:
        return any(section.id == "map" for section in self.sections)


Build = Callable[[PageRequest], DashboardPage]


def link_to(path: str, **query: str | int | None) -> str:
    """A link within the dashboard."""
    kept = {name: str(value) for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(kept)}" if kept else path
