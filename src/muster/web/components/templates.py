"""The pages' templates: Jinja2 files in ``muster/web/templates``, in which every value is escaped."""

from __future__ import annotations

import functools
from typing import Any

import jinja2

from muster.core import units
from muster.web.components import html, page, records, widgets


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("muster.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "moment": widgets.moment,
        "ago": widgets.relative_time,
        "duration": units.rounded_duration,
    }
    made.globals |= {
        "link": page.link_to,
        "badge": widgets.badge,
        "tone": widgets.severity_class,
        "action": widgets.action_button,
        "field": widgets.field,
        "empty": widgets.empty,
        "problem": widgets.problem,
        "table": records.table,
    }
    return made


def render(name: str, /, **values: Any) -> html.Markup:
    return html.Markup(_environment().get_template(name).render(**values))


def tiles(*made: widgets.Tile) -> html.Markup:
    return render("tiles.html", tiles=made)
