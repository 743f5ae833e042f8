"""Settings: typed, grouped, defaulted, and each explains itself.

A section is a `Section` struct; a whole is a struct of sections (`muster.core.settings.domain.BaseSettings`
is the one every process shares; `muster.app` adds the services').  Values come from four places, later ones
winning:

    defaults < a TOML file < environment (MUSTER_BUS__LEASE_TTL_S=20s) < flags ({"bus.lease_ttl_s": "20s"})

Every value is checked on its own, so that a fault is reported with the place it came from, and all faults are
reported at once.  An unknown key is a fault: it is most often a misspelt one, and the nearest spelling is
suggested.  A field whose name ends with ``_s`` takes a duration and one that ends with ``_bytes`` a size, as
a number or as text (``"15s"``, ``"64MiB"``).

A secret is never a value here: it is a reference, ``file:PATH`` or ``env:NAME``, read by whoever needs it,
when it needs it (`read_secret`).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import os
import pathlib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from muster.core import errors, units
from muster.core.formats import toml

ENV_PREFIX = "MUSTER_"
MAX_PROBLEMS = 50  # told at once
MAX_SECRET_BYTES = 64 << 10
MAX_NUMBER = (1 << 63) - 1  # what the broker and the database can hold

Path = toml.Path
T = TypeVar("T", bound=msgspec.Struct)


class SettingsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section. Checks of several fields together go into ``__post_init__``.

    Subclasses repeat ``frozen=True, kw_only=True``: neither msgspec nor the type checker inherits both.
    """


def field_doc(description: str, **constraints: Any) -> msgspec.Meta:
    """What a field means and what it costs to turn it up or down; with msgspec's constraints (``ge=…``)."""
    return msgspec.Meta(description=description, **constraints)


#: Text that names a secret. An empty one means: there is none.
Secret = Annotated[
    str, msgspec.Meta(pattern=r"^(|file:.+|env:[A-Za-z_][A-Za-z0-9_]*)$", extra={"secret": True})
]

#: A path which, where a settings file gives it and it is relative, starts from that file's folder.
FilePath = Annotated[str, msgspec.Meta(extra={"path": True})]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class SettingsProblem:
    """One fault: where it stands, which key, what is wrong with it and what would be right."""

    source: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.source}: {self.key}: {self.what}" if self.key else f"{self.source}: {self.what}"


class InvalidSettings(errors.InvalidInput):
    """All the faults there are, not only the first."""

    code = "invalid-settings"

    def __init__(self, problems: list[SettingsProblem]) -> None:
        super().__init__(
            "\n".join(map(str, problems)), hint="`muster config print` shows every key and its value"
        )
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class SettingsField:
    """One setting: a leaf of the tree of sections."""

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
        return self.path[-1].endswith("_s") and _bare(self.type) in (int, float)

    @property
    def is_size(self) -> bool:
        return self.path[-1].endswith("_bytes") and _bare(self.type) is int


@dataclass(frozen=True, slots=True)
class ResolvedSettings(Generic[T]):
    """Settings, and for each key that is not at its default the place that set it."""

    settings: T
    sources: Mapping[str, str]


def load(
    schema: type[T],
    *,
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> T:
    """The settings that result from these places; `InvalidSettings` lists everything that is wrong."""
    return resolve(schema, file=file, env=env, flags=flags).settings


def resolve(
    schema: type[T],
    *,
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> ResolvedSettings[T]:
    """As `load`, with the source of each value."""
    index = {field.path: field for field in fields(schema)}
    problems: list[SettingsProblem] = []
    values: dict[Path, Any] = {}
    sources: dict[str, str] = {}

    def take(path: Path, raw: Any, source: str, *, folder: pathlib.Path | None = None) -> None:
        field = index.get(path)
        if len(problems) >= MAX_PROBLEMS:
            return
        if field is None:
            problems.append(SettingsProblem(source[:400], ".".join(path)[:200], _unknown(path, index)))
            return
        try:
            value = _convert(field, raw)
        except errors.InvalidInput as error:
            problems.append(SettingsProblem(source, field.key, error.message))
            return
        if field.is_path and folder is not None and value:
            value = str(folder / pathlib.Path(value).expanduser())
        values[path] = value
        sources[field.key] = source

    if file is not None:
        location = pathlib.Path(file)
        document = toml.read(location)
        for path, raw in _leaves(document.tree, index):
            line = document.line(path)
            source = f"{location}:{line}" if line else str(location)
            take(path, raw, source, folder=location.absolute().parent)
    for name, raw in sorted((env or {}).items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            take(tuple(name[len(ENV_PREFIX) :].lower().split("__")), raw, f"environment {name}")
        elif misspelt := _misspelt_env(name, index):
            problems.append(
                SettingsProblem(f"environment {name}", "", f"did you mean {misspelt} (two underscores)?")
            )
    for key, raw in (flags or {}).items():
        take(tuple(key.split(".")), raw, f"flag {key}")

    settings = _build(schema(), (), values, sources, problems)
    if problems:
        raise InvalidSettings(problems)
    return ResolvedSettings(settings, sources)


def read_secret(reference: str, env: Mapping[str, str], *, folder: pathlib.Path | None = None) -> str:
    """The secret that ``reference`` names, without the newline a file ends with."""
    kind, _, name = reference.partition(":")
    if kind == "env" and name:
        if name not in env:
            raise errors.NotFound(f"the environment has no {name}, which holds a secret", hint=f"set {name}")
        return env[name]
    if kind == "file" and name:
        path = (folder or pathlib.Path()) / pathlib.Path(name).expanduser()
        try:
            with path.open("rb") as opened:
                data = opened.read(MAX_SECRET_BYTES + 1)
        except OSError as error:
            raise errors.NotFound(f"cannot read the secret in {path}: {error.strerror}") from error
        if len(data) > MAX_SECRET_BYTES:
            raise errors.LimitExceeded(f"{path} is over {MAX_SECRET_BYTES} bytes: not a secret")
        try:
            return data.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise errors.InvalidInput(f"{path} is not UTF-8 text") from error
    raise errors.InvalidInput("a secret is named by file:PATH or env:NAME, never given itself")


# -- the tree of fields ------------------------------------------------------------------------------------


@functools.cache
def fields(schema: type[msgspec.Struct]) -> tuple[SettingsField, ...]:
    """Every setting of ``whole``, in the order of the source. All have defaults: ``whole()`` is valid."""
    return tuple(_fields(schema(), ()))


def _fields(defaults: msgspec.Struct, prefix: Path) -> Iterator[SettingsField]:
    for info in msgspec.structs.fields(defaults):
        path, default = (*prefix, info.name), getattr(defaults, info.name)
        if isinstance(default, msgspec.Struct):
            yield from _fields(default, path)
            continue
        metas = _metas(info.type)
        extra = {key: value for meta in metas for key, value in (meta.extra or {}).items()}
        yield SettingsField(
            path=path,
            type=info.type,
            default=default,
            description=next((meta.description for meta in reversed(metas) if meta.description), ""),
            secret=bool(extra.get("secret")),
            is_path=bool(extra.get("path")),
        )


def _metas(annotation: Any) -> list[msgspec.Meta]:
    if typing.get_origin(annotation) is not Annotated:
        return []
    return [meta for meta in annotation.__metadata__ if isinstance(meta, msgspec.Meta)]


def _bare(annotation: Any) -> Any:
    return annotation.__origin__ if typing.get_origin(annotation) is Annotated else annotation


def _build(
    defaults: T,
    prefix: Path,
    values: Mapping[Path, Any],
    sources: Mapping[str, str],
    problems: list[SettingsProblem],
) -> T:
    """``defaults`` with ``values`` in place, from the leaves up, so that each section's own check runs."""
    arguments: dict[str, Any] = {}
    before = len(problems)
    for info in msgspec.structs.fields(defaults):
        path, default = (*prefix, info.name), getattr(defaults, info.name)
        if isinstance(default, msgspec.Struct):
            arguments[info.name] = _build(default, path, values, sources, problems)
        else:
            arguments[info.name] = values.get(path, default)
    if len(problems) == before:
        try:
            return type(defaults)(**arguments)
        except errors.InvalidInput as error:
            key = ".".join(prefix)
            at = {source for name, source in sources.items() if name.startswith(f"{key}." if key else "")}
            problems.append(SettingsProblem(", ".join(sorted(at)) or "defaults", key, error.message))
    return defaults


# -- reading -----------------------------------------------------------------------------------------------


def _leaves(
    table: Mapping[str, Any], index: Mapping[Path, SettingsField], prefix: Path = ()
) -> Iterator[tuple[Path, Any]]:
    """A table is descended into only where sections may still follow; elsewhere it is a (faulty) value."""
    for name, value in table.items():
        path = (*prefix, name)
        if isinstance(value, Mapping) and path not in index and any(p[: len(path)] == path for p in index):
            yield from _leaves(value, index, path)
        else:
            yield path, value


def _unknown(path: Path, index: Mapping[Path, SettingsField]) -> str:
    key = ".".join(path)
    below = [field.key for field in index.values() if field.path[: len(path)] == path]
    if below:
        return f"is a section, not a value: it holds {', '.join(below[:6])}{', …' if len(below) > 6 else ''}"
    known = [field.key for field in index.values()]
    sections = {".".join(p[:depth]) for p in index for depth in range(1, len(p))}
    near = difflib.get_close_matches(key[:200], [*known, *sections], n=1, cutoff=0.6)
    if not near:  # the right name in the wrong section
        near = [field.key for field in index.values() if field.path[-1] == path[-1]][:1]
    return (
        f"unknown setting; did you mean {near[0]}?"
        if near
        else f"unknown setting; sections: {_sections(index)}"
    )


def _sections(index: Mapping[Path, SettingsField]) -> str:
    return ", ".join(dict.fromkeys(path[0] for path in index))


def _misspelt_env(name: str, index: Mapping[Path, SettingsField]) -> str | None:
    """The right name for a variable that has single underscores where it needs double ones."""
    if not name.startswith(ENV_PREFIX):
        return None
    return next((field.env for field in index.values() if field.env.replace("__", "_") == name), None)


def _convert(field: SettingsField, raw: Any) -> Any:
    """``raw``, from a parsed file or as text, to the field's type."""
    if isinstance(raw, str):
        raw = _from_text(field, raw)
    if isinstance(raw, float) and not math.isfinite(raw):
        raise errors.InvalidInput("must be a finite number")
    if isinstance(raw, int) and abs(raw) > MAX_NUMBER:
        raise errors.InvalidInput(f"must be at most {MAX_NUMBER}")
    if _bare(field.type) is float and type(raw) is int:
        raw = float(raw)
    try:
        return msgspec.convert(raw, field.type)
    except msgspec.ValidationError as error:
        takes = f"it takes {describe_type(field)}"
        if field.secret:  # one that was given itself, by mistake, must not be repeated in a message
            raise errors.InvalidInput(takes) from None
        why = str(error).replace("`", "").removesuffix(" - at $")
        raise errors.InvalidInput(f"{why[:200]}; {takes}") from error


_TRUTH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def _from_text(field: SettingsField, text: str) -> Any:
    bare = _bare(field.type)
    if field.is_size:
        return units.parse_size_bytes(text)
    if field.is_duration:
        seconds = units.parse_duration_s(text)
        return int(seconds) if bare is int and seconds == int(seconds) else seconds
    if bare is bool:
        return _TRUTH.get(text.strip().lower(), text)
    if typing.get_origin(bare) is tuple:
        item = _bare(typing.get_args(bare)[0])
        return tuple(_number(item, part.strip()) for part in text.split(",") if part.strip())
    return _number(bare, text)


def _number(kind: Any, text: str) -> Any:
    """``text`` as a number where ``kind`` is one and it can be read as one."""
    if kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


# -- writing -----------------------------------------------------------------------------------------------


def describe_type(field: SettingsField) -> str:
    """What a field takes, in words."""
    if field.secret:
        return "a reference to a secret (file:PATH or env:NAME)"
    if field.is_duration:
        kind = "a duration (15s, 1h30m, or a number of seconds)"
    elif field.is_size:
        kind = "a size (64MiB, or a number of bytes)"
    else:
        kind = _type_words(_bare(field.type))
    metas = _metas(field.type)
    bounds = [
        f"{words} {units.format_size(value) if field.is_size else format(value, '.15g')}"
        for words, name in (("at least", "ge"), ("more than", "gt"), ("at most", "le"), ("less than", "lt"))
        for meta in metas
        if (value := getattr(meta, name)) is not None
    ]
    return kind + (f", {' and '.join(bounds)}" if bounds else "")


def _type_words(bare: Any) -> str:
    origin = typing.get_origin(bare)
    if origin is Literal:
        return " | ".join(f'"{option}"' for option in typing.get_args(bare))
    if origin is tuple:
        return f"a list of {_type_words(_bare(typing.get_args(bare)[0])).removeprefix('a ')}s"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_words(_bare(part)) for part in typing.get_args(bare))
    return {str: "text", int: "a whole number", float: "a number", bool: "true | false"}.get(bare, str(bare))


def value_of(settings: msgspec.Struct, path: Path) -> Any:
    return functools.reduce(getattr, path, settings)


_USER_INFO = re.compile(r"(?<=://)[^/@\s]*(?=@)")


def masked(text: str) -> str:
    """``text`` with the password of any URL in it replaced."""
    return _USER_INFO.sub(
        lambda info: f"{info[0].partition(':')[0]}:***" if ":" in info[0] else info[0], text
    )


def to_toml(settings: msgspec.Struct, sources: Mapping[str, str] | None = None) -> str:
    """The settings in force, as a file that `load` reads back; with ``sources``, who set each of them."""
    lines: list[str] = []
    table: Path = ()
    for field in fields(type(settings)):
        if field.path[:-1] != table:
            table = field.path[:-1]
            lines += [*([""] if lines else []), f"[{'.'.join(table)}]"]
        line = f"{field.path[-1]} = {toml.write(render_value(settings, field.path))}"
        if sources is not None:
            line += f"  # {sources.get(field.key, 'default')}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def render_value(settings: msgspec.Struct, path: Path) -> Any:
    """The value of a setting, without the password of any URL in it."""
    value = value_of(settings, path)
    if isinstance(value, tuple):
        return tuple(masked(item) if isinstance(item, str) else item for item in value)
    return masked(value) if isinstance(value, str) else value


def reference(schema: type[msgspec.Struct]) -> str:
    """The reference page, in Markdown, made from the source."""
    lines = [
        "# Settings",
        "",
        "Made from the source; do not edit. A value comes from the default, then the TOML file, then the",
        "environment, then flags (`--set bus.lease_ttl_s=20s`); the last one wins. Unknown keys are errors.",
        "Durations and sizes are numbers, or text such as `15s` and `64MiB`.",
    ]
    titles = _section_titles(schema(), ())
    table: Path = ()
    for field in fields(schema):
        if field.path[:-1] != table:
            table = field.path[:-1]
            lines += ["", f"{'#' * (len(table) + 1)} `[{'.'.join(table)}]`", "", titles[table], ""]
        lines += [
            f"- **`{field.path[-1]}`** = `{_default(field)}` — {describe_type(field)}. `{field.env}`  ",
            f"  {field.description}",
        ]
    return "\n".join(lines) + "\n"


def _default(field: SettingsField) -> str:
    if field.is_duration and field.default:
        return f'"{units.format_duration(field.default)}"'
    if field.is_size and field.default:
        return f'"{units.format_size(field.default)}"'
    return toml.write(field.default)


def _section_titles(defaults: msgspec.Struct, prefix: Path) -> dict[Path, str]:
    """A section's words: its field's description where it has one, else its docstring."""
    titles: dict[Path, str] = {}
    for info in msgspec.structs.fields(defaults):
        section = getattr(defaults, info.name)
        if isinstance(section, msgspec.Struct):
            path = (*prefix, info.name)
            description = next((meta.description for meta in _metas(info.type) if meta.description), None)
            titles[path] = " ".join((description or type(section).__doc__ or "").split())
            titles |= _section_titles(section, path)
    return titles
