"""Types of settings: sections, fields, and the text that describes a field.

A section is a `SettingsSection` struct.  The settings of a process are a struct of sections:
`muster.core.settings.domain.BaseSettings` has those that every process shares, and `muster.app.settings` adds
those of the services.  `muster.core.settings.loader` reads them.

A field whose name ends with ``_s`` takes a duration and a field whose name ends with ``_bytes`` a size, as a
number or as text (``"15s"``, ``"64MiB"``).
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from muster.core import units
from muster.core.formats import toml

ENV_PREFIX = "MUSTER_"

Path = toml.Path


class SettingsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section. Checks of several fields together go into ``__post_init__``.

    Subclasses repeat ``frozen=True, kw_only=True``: neither msgspec nor the type checker inherits both.
    """


def field_doc(description: str, **constraints: Any) -> msgspec.Meta:
    """Describe a field: its meaning and the trade-off of its value, with msgspec constraints (``ge=…``)."""
    return msgspec.Meta(description=description, **constraints)


#: A reference to a secret. Empty: there is no secret.
Secret = Annotated[
    str, msgspec.Meta(pattern=r"^(|file:.+|env:[A-Za-z_][A-Za-z0-9_]*)$(?!\n)", extra={"secret": True})
]

#: A path. A relative path in a settings file is relative to the folder of that file.
FilePath = Annotated[str, msgspec.Meta(extra={"path": True})]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class SettingsField:
    """A setting: a leaf of the tree of sections."""

    path: Path
    type: Any
    default: Any
    description: str
    secret: bool
    is_path: bool

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def env(self) -> str:
        return ENV_PREFIX + "__".join(self.path).upper()

    @property
    def is_duration(self) -> bool:
        return self.path[-1].endswith("_s") and bare(self.type) in (int, float)

    @property
    def is_size(self) -> bool:
        return self.path[-1].endswith("_bytes") and bare(self.type) is int


@functools.cache
def fields(schema: type[msgspec.Struct]) -> tuple[SettingsField, ...]:
    """All settings of ``schema``, in the order of the source. All have defaults: ``schema()`` is valid."""
    return tuple(_fields(schema(), ()))


def _fields(defaults: msgspec.Struct, prefix: Path) -> Iterator[SettingsField]:
    for info in msgspec.structs.fields(defaults):
        path, default = (*prefix, info.name), getattr(defaults, info.name)
        if isinstance(default, msgspec.Struct):
            yield from _fields(default, path)
            continue
        annotations = metas(info.type)
        extra = {key: value for meta in annotations for key, value in (meta.extra or {}).items()}
        yield SettingsField(
            path=path,
            type=info.type,
            default=default,
            description=next((meta.description for meta in reversed(annotations) if meta.description), ""),
            secret=bool(extra.get("secret")),
            is_path=bool(extra.get("path")),
        )


def metas(annotation: Any) -> list[msgspec.Meta]:
    if typing.get_origin(annotation) is not Annotated:
        return []
    return [meta for meta in annotation.__metadata__ if isinstance(meta, msgspec.Meta)]


def bare(annotation: Any) -> Any:
    return annotation.__origin__ if typing.get_origin(annotation) is Annotated else annotation


def describe_type(field: SettingsField) -> str:
    """The accepted values of a field, as text."""
    if field.secret:
        return "a reference to a secret (file:PATH or env:NAME)"
    if field.is_duration:
        kind = "a duration (15s, 1h30m, or a number of seconds)"
    elif field.is_size:
        kind = "a size (64MiB, or a number of bytes)"
    else:
        kind = _type_text(bare(field.type))
    annotations = metas(field.type)
    bounds = [
        f"{words} {units.format_size(value) if field.is_size else format(value, '.15g')}"
        for words, name in (("at least", "ge"), ("more than", "gt"), ("at most", "le"), ("less than", "lt"))
        for meta in annotations
        if (value := getattr(meta, name)) is not None
    ]
    return kind + (f", {' and '.join(bounds)}" if bounds else "")


def _type_text(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return " | ".join(f'"{option}"' for option in typing.get_args(kind))
    if origin is tuple:
        inner = bare(typing.get_args(kind)[0])
        item = _type_text(inner).removeprefix("an ").removeprefix("a ")
        if typing.get_origin(inner) is Literal:
            return f"a list of {item}"
        name, _, fields = item.partition(" ")
        return f"a list of {name}s {fields}".rstrip()
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_text(bare(part)) for part in typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"table ({', '.join(kind.__struct_fields__)})"
    return {str: "text", int: "an integer", float: "a number", bool: "true | false"}.get(kind, str(kind))
