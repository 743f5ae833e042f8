"""The reference page of all settings, generated from their types."""

from __future__ import annotations

import msgspec

from muster.app import settings as app_settings
from muster.core import units
from muster.core.formats import toml
from muster.core.settings import sections

_UNITS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}


def render_page(schema: type[msgspec.Struct] = app_settings.Settings) -> str:
    lines = [
        "# Settings",
        "",
        "The sources of a value are the default, the TOML file, the environment and flags",
        "(`--set bus.lease_ttl_s=20s`); later ones override earlier ones. Unknown keys are errors.",
        "Durations and sizes are numbers, or text such as `15s` and `64MiB`.",
    ]
    titles = _section_titles(schema(), ())
    table: sections.Path = ()
    for field in sections.fields(schema):
        if field.path[:-1] != table:
            table = field.path[:-1]
            lines += ["", f"{'#' * (len(table) + 1)} `[{'.'.join(table)}]`", "", titles[table], ""]
        lines += [
            f"- **`{field.path[-1]}`** = `{_default(field)}` — {sections.describe_type(field)}."
            f" `{field.env}`  ",
            f"  {field.description}",
        ]
    return "\n".join(lines) + "\n"


def _default(field: sections.SettingsField) -> str:
    if field.is_duration and field.default:
        return f'"{_duration(field.default)}"'
    if field.is_size and field.default:
        return f'"{units.format_size(field.default)}"'
    return toml.write(field.default)


def _section_titles(defaults: msgspec.Struct, prefix: sections.Path) -> dict[sections.Path, str]:
    """The description of each section: that of its field if there is one, else the docstring of its type."""
    titles: dict[sections.Path, str] = {}
    for info in msgspec.structs.fields(defaults):
        section = getattr(defaults, info.name)
        if isinstance(section, msgspec.Struct):
            path = (*prefix, info.name)
            description = next(
                (meta.description for meta in sections.metas(info.type) if meta.description), None
            )
            titles[path] = " ".join((description or type(section).__doc__ or "").split())
            titles |= _section_titles(section, path)
    return titles


def _duration(seconds: float) -> str:
    """The shortest exact form."""
    for unit, unit_s in _UNITS.items():
        count = seconds / unit_s
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"
