"""Loading of settings, and their text form: the file of the settings in force and the reference page.

Values come from four sources; later ones override earlier ones:

    defaults < a TOML file < environment (MUSTER_BUS__LEASE_TTL_S=20s) < flags ({"bus.lease_ttl_s": "20s"})

Each value is checked on its own, so that an error names the source of the value, and all errors are reported
together.  An unknown key is an error, because most unknown keys are misspelt; the closest known key is
suggested.

The value of a secret setting is a reference, ``file:PATH`` or ``env:NAME``.  The code that needs the secret
reads it at the time of use (`read_secret`).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import os
import pathlib
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from muster.core import errors, files, units
from muster.core.formats import toml
from muster.core.settings import sections

MAX_PROBLEMS = 50  # reported together
MAX_SECRET_BYTES = 64 << 10
MAX_NUMBER = (1 << 63) - 1  # the largest number that the broker and the database can store

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class SettingsProblem:
    """An error in the settings: its source, the key, and the reason with the accepted form."""

    source: str
    key: str
    what: str

    def __str__(self) -> str:
        names_key = not self.key or self.source.endswith(f" {self.key}")
        return f"{self.source}: {self.what}" if names_key else f"{self.source}: {self.key}: {self.what}"


class InvalidSettings(errors.InvalidInput):
    """All errors of the settings together."""

    code = "invalid-settings"

    def __init__(self, problems: list[SettingsProblem]) -> None:
        super().__init__(
            "\n".join(map(str, problems)), hint="`muster config print` shows every key and its value"
        )
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class ResolvedSettings(Generic[T]):
    """Settings, and the source of each value that is not the default."""

    settings: T
    sources: Mapping[str, str]


def load(
    schema: type[T],
    *,
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    whole: bool = True,
) -> T:
    """Merge the sources into settings; `InvalidSettings` lists all errors.

    ``whole`` False: ``schema`` has only some of the sections; those that it does not have are skipped.
    """
    return resolve(schema, file=file, env=env, flags=flags, whole=whole).settings


def resolve(
    schema: type[T],
    *,
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    whole: bool = True,
) -> ResolvedSettings[T]:
    """Like `load`, with the source of each value."""
    index = {field.path: field for field in sections.fields(schema)}
    known = {path[0] for path in index}
    problems: list[SettingsProblem] = []
    values: dict[sections.Path, Any] = {}
    sources: dict[str, str] = {}

    def assign(path: sections.Path, raw: Any, source: str, *, folder: pathlib.Path | None = None) -> None:
        field = index.get(path)
        if len(problems) >= MAX_PROBLEMS or not (whole or path[0] in known):
            return
        if field is None:
            problems.append(SettingsProblem(source[:400], ".".join(path)[:200], _unknown(path, index)))
            return
        try:
            value = _convert(field, raw)
            if field.is_path and folder is not None and value and "://" not in value:
                value = str(folder / files.expanded(value))
        except errors.InvalidInput as error:
            problems.append(SettingsProblem(source, field.key, error.message))
            return
        values[path] = value
        sources[field.key] = source

    if file is not None:
        location = pathlib.Path(file)
        document = toml.read(location)
        for path, raw in _leaves(document.tree, index):
            line = document.line(path)
            source = f"{location}:{line}" if line else str(location)
            assign(path, raw, source, folder=location.absolute().parent)
    for name, raw in sorted((env or {}).items()):
        if name.startswith(sections.ENV_PREFIX) and "__" in name:
            assign(tuple(name[len(sections.ENV_PREFIX) :].lower().split("__")), raw, f"environment {name}")
        elif misspelt := _misspelt_env(name, index):
            problems.append(
                SettingsProblem(f"environment {name}", "", f"did you mean {misspelt} (two underscores)?")
            )
    for key, raw in (flags or {}).items():
        assign(tuple(key.split(".")), raw, f"--set {key}")

    settings = _build(schema(), (), values, sources, problems)
    if problems:
        raise InvalidSettings(problems)
    return ResolvedSettings(settings, sources)


def read_secret(reference: str, env: Mapping[str, str], *, folder: pathlib.Path | None = None) -> str:
    """Read the secret that ``reference`` names, without the final newline of a file."""
    kind, _, name = reference.partition(":")
    if kind == "env" and name:
        if name not in env:
            raise errors.NotFound(
                f"the environment variable {name}, which holds a secret, is not set", hint=f"set {name}"
            )
        return env[name]
    if kind == "file" and name:
        path = (folder or pathlib.Path()) / files.expanded(name)
        try:
            with path.open("rb") as opened:
                data = opened.read(MAX_SECRET_BYTES + 1)
        except OSError as error:
            raise errors.NotFound(f"cannot read the secret in {path}: {error.strerror}") from error
        if len(data) > MAX_SECRET_BYTES:
            raise errors.LimitExceeded(f"the secret in {path} is longer than {MAX_SECRET_BYTES} bytes")
        try:
            return data.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise errors.InvalidInput(f"{path} is not UTF-8 text") from error
    raise errors.InvalidInput("a secret setting takes file:PATH or env:NAME, not the secret itself")


def _build(
    defaults: T,
    prefix: sections.Path,
    values: Mapping[sections.Path, Any],
    sources: Mapping[str, str],
    problems: list[SettingsProblem],
) -> T:
    """Replace defaults by ``values``, innermost sections first, so that the check of each section runs."""
    arguments: dict[str, Any] = {}
    before = len(problems)
    for name in defaults.__struct_fields__:
        path, default = (*prefix, name), getattr(defaults, name)
        if isinstance(default, msgspec.Struct):
            arguments[name] = _build(default, path, values, sources, problems)
        else:
            arguments[name] = values.get(path, default)
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
    table: Mapping[str, Any],
    index: Mapping[sections.Path, sections.SettingsField],
    prefix: sections.Path = (),
) -> Iterator[tuple[sections.Path, Any]]:
    """Yield keys and values. A table below a setting, where no section can be, is an (invalid) value."""
    for name, value in table.items():
        path = (*prefix, name)
        if isinstance(value, Mapping) and path not in index and any(p[: len(path)] == path for p in index):
            yield from _leaves(value, index, path)
        else:
            yield path, value


def _unknown(path: sections.Path, index: Mapping[sections.Path, sections.SettingsField]) -> str:
    key = ".".join(path)
    below = [field.key for field in index.values() if field.path[: len(path)] == path]
    if below:
        return f"is a section, not a setting: it has {', '.join(below[:6])}{', …' if len(below) > 6 else ''}"
    known = [field.key for field in index.values()]
    section_names = {".".join(p[:depth]) for p in index for depth in range(1, len(p))}
    near = difflib.get_close_matches(key[:200], [*known, *section_names], n=1, cutoff=0.6)
    if not near:  # perhaps the right name in the wrong section
        near = [field.key for field in index.values() if field.path[-1] == path[-1]][:1]
    return (
        f"unknown setting; did you mean {near[0]}?"
        if near
        else f"unknown setting; sections: {_sections(index)}"
    )


def _sections(index: Mapping[sections.Path, sections.SettingsField]) -> str:
    return ", ".join(dict.fromkeys(path[0] for path in index))


def _misspelt_env(name: str, index: Mapping[sections.Path, sections.SettingsField]) -> str | None:
    """The correct name of a variable that has single underscores in place of double ones."""
    if not name.startswith(sections.ENV_PREFIX):
        return None
    return next((field.env for field in index.values() if field.env.replace("__", "_") == name), None)


def _convert(field: sections.SettingsField, raw: Any) -> Any:
    """Convert ``raw``, from a parsed file or as text, to the type of the field."""
    if isinstance(raw, str):
        raw = _from_text(field, raw)
    if isinstance(raw, float) and not math.isfinite(raw):
        raise errors.InvalidInput("must be a finite number")
    if isinstance(raw, int) and abs(raw) > MAX_NUMBER:
        raise errors.InvalidInput(f"must be at most {MAX_NUMBER}")
    if sections.bare(field.type) is float and type(raw) is int:
        raw = float(raw)
    try:
        return msgspec.convert(raw, field.type)
    except msgspec.ValidationError as error:
        takes = f"it takes {sections.describe_type(field)}"
        if field.secret:  # a secret written here by mistake must not appear in a message
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


def _from_text(field: sections.SettingsField, text: str) -> Any:
    bare = sections.bare(field.type)
    if field.is_size:
        return units.parse_size_bytes(text)
    if field.is_duration:
        seconds = units.parse_duration_s(text)
        return int(seconds) if bare is int and seconds == int(seconds) else seconds
    if bare is bool:
        return _TRUTH.get(text.strip().lower(), text)
    if typing.get_origin(bare) is tuple:
        if text.strip().startswith("["):
            return toml.read_list(text.strip())
        item = sections.bare(typing.get_args(bare)[0])
        return tuple(_number(item, part.strip()) for part in text.split(",") if part.strip())
    return _number(bare, text)


def _number(kind: Any, text: str) -> Any:
    """Convert ``text`` to a number if ``kind`` is a number type and ``text`` is a number."""
    if kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


# -- writing ------------------------------------------------------------------------------------------------


def value_of(settings: msgspec.Struct, path: sections.Path) -> Any:
    return functools.reduce(getattr, path, settings)


_USER_INFO = re.compile(r"(?<=://)[^/@\s]*(?=@)")


def masked(text: str) -> str:
    """Replace the password of each URL in ``text``."""
    return _USER_INFO.sub(
        lambda info: f"{info[0].partition(':')[0]}:***" if ":" in info[0] else info[0], text
    )


def to_toml(settings: msgspec.Struct, sources: Mapping[str, str] | None = None) -> str:
    """Write the settings in force as a file that `load` reads; ``sources`` adds the source of each value."""
    lines: list[str] = []
    table: sections.Path = ()
    for field in sections.fields(type(settings)):
        if field.path[:-1] != table:
            table = field.path[:-1]
            lines += [*([""] if lines else []), f"[{'.'.join(table)}]"]
        line = f"{field.path[-1]} = {toml.write(render_value(settings, field.path))}"
        if sources is not None:
            line += f"  # {sources.get(field.key, 'default')}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def render_value(settings: msgspec.Struct, path: sections.Path) -> Any:
    """The value of a setting, with passwords of URLs replaced."""
    value = value_of(settings, path)
    if isinstance(value, tuple):
        return tuple(masked(item) if isinstance(item, str) else item for item in value)
    return masked(value) if isinstance(value, str) else value
