"""The reference page of the files that people write, generated from their types."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from muster.app import file_formats
from muster.core.settings import sections
from muster.loop import reaction_rules, response_rules
from muster.manage import manifest, protocol, topologies
from muster.manage.adapters import health_checks, http, plugins, process
from muster.pipeline.alerts import notifications, rules


def render_page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Manifests, rules, responses and reactions"
    yield ""
    yield "The files that people write, in YAML. `muster schema FORMAT` prints the JSON Schema of a format"
    yield "for editors, and `muster schema FORMAT --example` the examples of this page."
    for name, form in file_formats.FORMATS.items():
        yield from ("", f"## {form.title}", "", form.intro, "", "```yaml", form.example.rstrip(), "```")
        yield from _tables(name)


def _tables(name: str) -> Iterator[str]:
    match name:
        case "manifest":
            yield from _table("A resource", manifest.ManifestEntry)
            yield from _table("`restart`", protocol.RestartPolicy)
            yield from _table("`update`", protocol.UpdatePolicy)
            yield from _table("`placement`", protocol.Placement)
            yield from _table("`reschedule`", protocol.ReschedulePolicy)
            yield from _table("`hooks`", protocol.Hooks)
            yield from _table("`post_start` and `pre_stop`", protocol.HookCommand)
            yield from _table("`job`", protocol.JobPolicy)
            yield from _table("`schedule`", protocol.JobSchedule)
            for kind in sorted(plugins.BUILT_IN):
                yield from _table(f"`config` of the type {kind}", plugins.load_adapter(kind).config_type)
                if kind == "process":
                    yield from _table("`health` of a process", health_checks.HealthCheck)
                    yield from _table("`limits` of a process", process.ProcessLimits)
                    yield from _table("`cgroup` of a process", process.GroupLimits)
                if kind == "http":
                    yield from _table("`start`, `stop` and `configure` of a service", http.HttpCall)
            yield from _table("A topology", topologies.Topology)
        case "rules":
            yield from _table("A rule", rules.AlertRule, renamed={"for_s": "for"})
            yield from _table("A contact", notifications.AlertContact)
        case "responses":
            yield from _table("A response", response_rules.ResponseSpec)
        case "reactions":
            yield from _table("A reaction", reaction_rules.ReactionSpec)


def _table(
    title: str, type_: type[msgspec.Struct], *, renamed: dict[str, str] | None = None
) -> Iterator[str]:
    yield from ("", f"### {title}", "", " ".join((type_.__doc__ or "").replace("``", "`").split()), "")
    yield "| field | value | default | meaning |"
    yield "|---|---|---|---|"
    for field in msgspec.structs.fields(type_):
        name = (renamed or {}).get(field.name, field.name)
        described = next((meta.description for meta in _metas(field.type) if meta.description), "")
        yield f"| `{name}` | {_kind(field.type)} | {_default(field)} | {_cell(described)} |"


def _metas(annotation: Any) -> list[msgspec.Meta]:
    """Also those of the members of a union, as of ``Annotated[int, …] | None``."""
    own = sections.metas(annotation)
    return own or [meta for part in typing.get_args(annotation) for meta in sections.metas(part)]


def _kind(annotation: Any) -> str:
    kind = sections.bare(annotation)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    bounds = [
        f"{sign} {value:g}"
        for meta in sections.metas(annotation)
        for sign, value in (("≥", meta.ge), (">", meta.gt), ("≤", meta.le), ("<", meta.lt))
        if value is not None
    ]
    if origin is typing.Literal:
        text = ", ".join(f"`{option}`" for option in parts)
    elif origin in (types.UnionType, typing.Union):
        text = " or ".join(dict.fromkeys(_kind(part) for part in parts if part is not type(None)))
    elif origin is tuple:
        text = f"list of {_kind(parts[0])}"
    elif origin is dict:
        text = "mapping" if parts[1] is Any else f"mapping to {_kind(parts[1])}"
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        text = ", ".join(f"`{member.value}`" for member in kind)
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        text = "see below"
    else:
        text = {str: "text", int: "integer", float: "number", bool: "`true`, `false`"}.get(kind, "any")
    return ", ".join([text, *bounds])


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    default = field.default
    if default is msgspec.NODEFAULT:
        default = field.default_factory()
    if isinstance(default, enum.Enum):
        default = default.value
    if default in (None, "", (), {}) or isinstance(default, msgspec.Struct | dict):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
