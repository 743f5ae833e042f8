"""Pages: the request of a person, and the sections of a page.

A page has no data of its own: it calls the functions of the REST routes, with the person's rights. Its
template is a file with a block for each section, which gets what the section has loaded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from muster.web import request_state
from muster.web.auth import sessions
from muster.web.rest import base, route

PARAMETER_MAX = 4096


@dataclass(frozen=True, slots=True)
class PageRequest:
    call: request_state.RestCall
    path: str
    query: Mapping[str, str]
    form_token: str

    async def get(self, path: str, /, **parameters: Any) -> Any:
        """The result of a route of the REST API, before it is encoded."""
        answer, _ = route.ANSWERS[f"GET {path}"]
        return await answer(self.call, **parameters)

    async def post(self, path: str, /, **parameters: Any) -> Any:
        """The result of a route that only reads, and whose request has a body with the other parameters."""
        answer, body = route.ANSWERS[f"POST {path}"]
        assert body is not None
        return await answer(self.call, body=base.parsed(body, **parameters))

    def parameter(self, name: str, default: str = "") -> str:
        return self.query.get(name, default)[:PARAMETER_MAX]

    @property
    def person(self) -> sessions.LoginSession:
        return self.call.person

    @property
    def may_act(self) -> bool:
        return self.person.role.covers(sessions.WebRole.OPERATOR)

    @property
    def administers(self) -> bool:
        return self.person.role.covers(sessions.WebRole.ADMIN)

    @property
    def here(self) -> str:
        return link_to(self.path, **{name: text for name, text in self.query.items() if name != "manifest"})


Values = Mapping[str, Any]
Load = Callable[[], Awaitable[Values]]


@dataclass(frozen=True, slots=True)
class PageSection:
    """Rendered again when data with one of its ``tags`` changes, and every ``every_s``.

    ``load``: the values for its block, by default that with its id. ``template``: another than the page's.
    """

    id: str
    title: str
    load: Load
    tags: tuple[str, ...] = ()
    every_s: float = 5.0
    wide: bool = True
    template: str = ""
    block: str = ""


@dataclass(frozen=True, slots=True)
class DashboardPage:
    """``values``: for all blocks of the template. The blocks ``head`` and ``foot`` are not updated while the
    page is open, so that input in their forms is not lost.
    """

    title: str
    template: str
    sections: tuple[PageSection, ...] = ()
    lead: str = ""
    values: Values = field(default_factory=dict)

    @property
    def has_charts(self) -> bool:
        """Whether the page has a shared range of time."""
        return any(section.id.startswith("plot-") for section in self.sections)

    @property
    def has_map(self) -> bool:
        return any(section.id == "map" for section in self.sections)


Build = Callable[[PageRequest], DashboardPage]


def link_to(path: str, /, **query: str | int | None) -> str:
    """A link within the dashboard."""
    kept = {name: str(value) for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(kept)}" if kept else path
