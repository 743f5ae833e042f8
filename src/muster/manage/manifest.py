"""Manifests: YAML in, checked specifications out, every fault named by line and field.

    resources:
      - name: web-1
        type: process
        agent: host-a                  # or: where: "zone = 'east' AND disk = 'ssd'"
        group: web
        labels: {tier: front}
        depends_on: [db]               # a resource, or group:NAME for all of a group
        restart: {policy: always, attempts: 5}
        config: {command: [python3, -m, http.server, "8080"]}
    topologies:
      - {name: mesh, shape: ring, size: 8, agent: host-a}

Pure, and careful with what strangers wrote: size, depth and the number of nodes (which aliases multiply) are
bounded.  A secret is a reference, ``{secret: "file:/run/keys/db"}`` or ``{secret: "env:DB_PASSWORD"}`` of the
agent's machine, or ``{secret: "store:db-password"}`` (`secrecy`), resolved by the agent; its value never
stands in a manifest.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import msgspec
import yaml

from muster.core import errors, subjects
from muster.manage import dependencies, protocol, topologies
from muster.predicates.syntax import parser

BYTES_MAX = 4 << 20
NODES_MAX = 200_000
DEPTH_MAX = 40
GROUP = "group:"
REFER = 'refer to it: {secret: "file:PATH"}, {secret: "env:NAME"} or {secret: "store:NAME"}'

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
Check = Callable[[Mapping[str, Any]], None]
_PATH = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")
REFERENCES = ("file:", "env:", "store:")
_SECRET = re.compile(r"(?i)(password|passwd|secret|token|api_?key|private_?key)$")


class ManifestError(errors.InvalidInput):
    """``line`` and ``field`` of the manifest say where."""

    code = "bad-manifest"

    def __init__(self, message: str, *, line: int, field: str, hint: str | None = None) -> None:
        super().__init__(f"line {line}, {field or 'manifest'}: {message}", hint=hint)
        self.line = line
        self.field = field


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    type: Name
    agent: Name | None = None
    where: str | None = None
    config: dict[str, Any] = {}
    group: Name = "default"
    labels: dict[Name, str] = {}
    depends_on: tuple[str, ...] = ()
    wanted: protocol.DesiredState = protocol.DesiredState.UP
    restart: protocol.RestartPolicy = msgspec.field(default_factory=protocol.RestartPolicy)


class ManifestDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    resources: tuple[ManifestEntry, ...] = ()
    topologies: tuple[topologies.Topology, ...] = ()


Lines = dict[tuple[str | int, ...], int]


def read(text: str, checks: Mapping[str, Check]) -> list[ManifestEntry]:
    """The entries of a manifest, topologies unfolded, dependencies checked. Raises `Fault`.

    ``checks`` has, for each known type, what refuses a wrong configuration with an error that names a path.
    """
    if len(text.encode()) > BYTES_MAX:
        raise errors.LimitExceeded(f"a manifest of more than {BYTES_MAX} bytes: split it")
    lines: Lines = {}
    plain = _plain(_compose(text), lines)
    try:
        document = msgspec.convert(plain, ManifestDocument)
    except msgspec.ValidationError as error:
        raise _fault(str(error), lines) from error
    entries = [_checked(entry, number, checks, lines) for number, entry in enumerate(document.resources)]
    places: dict[str, tuple[str | int, ...]] = {
        entry.name: ("resources", number) for number, entry in enumerate(entries)
    }
    for number, topology in enumerate(document.topologies):
        path = ("topologies", number)
        try:
            unfolded = [msgspec.convert(one, ManifestEntry) for one in topologies.expand(topology)]
        except errors.InvalidInput as error:
            raise ManifestError(error.message, line=_line(lines, path), field=_dotted(path)) from error
        for one in unfolded:
            places.setdefault(one.name, path)
        entries += unfolded
    _distinct(entries, places, lines)
    _ordered(entries, places, lines)
    return entries


def specification(
    entry: ManifestEntry, agent: str, names_of: Callable[[str], Iterable[str]]
) -> protocol.ResourceSpec:
    """``names_of`` a group: its members, for dependencies upon all of it."""
    needed: dict[str, None] = {}
    for one in entry.depends_on:
        names = sorted(names_of(one.removeprefix(GROUP))) if one.startswith(GROUP) else [one]
        needed |= dict.fromkeys(names)
        if len(needed.keys() - {entry.name}) > protocol.DEPENDENCIES_MAX:
            raise too_many(entry.name)
    return protocol.ResourceSpec(
        name=entry.name,
        type=entry.type,
        agent=agent,
        config=entry.config,
        group=entry.group,
        labels=entry.labels,
        depends_on=tuple(dict.fromkeys(one for one in needed if one != entry.name)),
        wanted=entry.wanted,
        restart=entry.restart,
        digest=digest(entry.config),
    )


def too_many(name: str) -> errors.LimitExceeded:
    return errors.LimitExceeded(
        f"{name!r} depends on more than {protocol.DEPENDENCIES_MAX} resources",
        hint="depend on a smaller group, or on one resource that depends on the others",
    )


def digest(config: Mapping[str, Any]) -> str:
    """The same for the same configuration, however it was written."""
    return hashlib.sha256(msgspec.json.encode(dict(config), order="deterministic")).hexdigest()[:16]


# Reading


def _compose(text: str) -> yaml.Node | None:
    try:
        found: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        return found
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ManifestError(
            f"not YAML: {error.problem or error.context}", line=(mark.line + 1) if mark else 1, field=""
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ManifestError(f"not YAML: {error}", line=1, field="") from error


def _plain(root: yaml.Node | None, lines: Lines) -> Any:
    constructor = yaml.SafeLoader("")
    left = NODES_MAX

    def walk(node: yaml.Node, path: tuple[str | int, ...]) -> Any:
        nonlocal left
        left -= 1
        line = node.start_mark.line + 1
        if left < 0 or len(path) > DEPTH_MAX:
            raise ManifestError(
                "the manifest is too large once its aliases are followed", line=line, field=""
            )
        lines.setdefault(path, line)
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = key_node.value
                if not isinstance(key, str) or key in found:
                    problem = f"the field {key!r} stands twice" if isinstance(key, str) else "no plain name"
                    raise ManifestError(problem, line=key_node.start_mark.line + 1, field=_dotted(path))
                lines[(*path, key)] = key_node.start_mark.line + 1
                found[key] = walk(value_node, (*path, key))
            return found
        if isinstance(node, yaml.SequenceNode):
            return [walk(one, (*path, number)) for number, one in enumerate(node.value)]
        try:
            value = constructor.construct_object(node)
        except (yaml.YAMLError, ValueError, AttributeError) as error:
            raise ManifestError(f"cannot be read: {error}", line=line, field=_dotted(path)) from error
        if not isinstance(value, str | int | float | bool | None):
            raise ManifestError(
                "dates and binaries are not used here: quote it", line=line, field=_dotted(path)
            )
        return value

    return {} if root is None else walk(root, ())


def _checked(entry: ManifestEntry, number: int, checks: Mapping[str, Check], lines: Lines) -> ManifestEntry:
    path: tuple[str | int, ...] = ("resources", number)

    def refuse(field: str, message: str, hint: str | None = None) -> ManifestError:
        return ManifestError(
            message, line=_line(lines, (*path, field)), field=_dotted((*path, field)), hint=hint
        )

    if entry.type not in checks:
        near = difflib.get_close_matches(entry.type, checks, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(checks))}"
        raise refuse("type", f"no type {entry.type!r}", hint)
    if (entry.agent is None) == (entry.where is None):
        raise refuse("agent", "say where it runs: agent: NAME or where: EXPRESSION, one of them")
    if entry.where is not None:
        try:
            parser.parse(entry.where)
        except errors.MusterError as error:
            raise refuse("where", error.message, error.hint) from error
    for one in entry.depends_on:
        try:
            subjects.token(one.removeprefix(GROUP))
        except errors.InvalidInput as error:
            raise refuse("depends_on", error.message) from error
    found = find_plaintext_secret(entry.config)
    if found is not None:
        where = ("config", *found)
        raise ManifestError(
            "a secret's value must not stand in a manifest",
            line=_line(lines, (*path, *where)),
            field=_dotted((*path, *where)),
            hint=REFER,
        )
    try:
        checks[entry.type](entry.config)
    except (errors.InvalidInput, msgspec.ValidationError) as error:
        raise _fault(str(error), lines, (*path, "config")) from error
    return entry


def find_plaintext_secret(config: Any, path: tuple[str | int, ...] = ()) -> tuple[str | int, ...] | None:
    """Where something that is called like a secret holds plain text."""
    inside: Iterable[tuple[str | int, Any]] = ()
    if isinstance(config, dict):
        inside = config.items()
    elif isinstance(config, list):
        inside = enumerate(config)
    for key, value in inside:
        referred = key == "secret" and isinstance(value, str) and value.startswith(REFERENCES)
        if isinstance(key, str) and isinstance(value, str) and _SECRET.search(key) and not referred:
            return (*path, key)
        found = find_plaintext_secret(value, (*path, key))
        if found is not None:
            return found
    return None


def _distinct(
    entries: list[ManifestEntry], places: Mapping[str, tuple[str | int, ...]], lines: Lines
) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            path = (*places[entry.name], "name")
            raise ManifestError(
                f"{entry.name!r} is there twice", line=_line(lines, path), field=_dotted(path)
            )
        seen.add(entry.name)


def _ordered(entries: list[ManifestEntry], places: Mapping[str, tuple[str | int, ...]], lines: Lines) -> None:
    groups: dict[str, list[str]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry.name)
    needs: dict[str, list[str]] = {}
    for entry in entries:
        named = [groups.get(one.removeprefix(GROUP), []) for one in entry.depends_on if one.startswith(GROUP)]
        itself = f"{GROUP}{entry.group}" in entry.depends_on
        if sum(map(len, named)) - itself > protocol.DEPENDENCIES_MAX:
            path = (*places[entry.name], "depends_on")
            error = too_many(entry.name)
            raise ManifestError(error.message, line=_line(lines, path), field=_dotted(path), hint=error.hint)
        needs[entry.name] = [name for names in named for name in names if name != entry.name]
        needs[entry.name] += [one for one in entry.depends_on if not one.startswith(GROUP)]
    circle = dependencies.find_cycle(needs)
    if circle is not None:
        path = (*places[circle[0]], "depends_on")
        raise ManifestError(f"a circle: {' -> '.join(circle)}", line=_line(lines, path), field=_dotted(path))


# Where a fault is


def _fault(message: str, lines: Lines, base: tuple[str | int, ...] = ()) -> ManifestError:
    """msgspec says ``Expected `int` … - at `$.resources[0].restart.attempts```."""
    said, _, where = message.partition(" - at `$")
    path = base
    for name, index in _PATH.findall(where.rstrip("`")):
        path = (*path, name if name else int(index) if index else "…")
    field = re.search(r"unknown field `([^`]+)`", said)
    if field:
        path = (*path, field[1])
    return ManifestError(said, line=_line(lines, path), field=_dotted(path))


def _line(lines: Lines, path: tuple[str | int, ...]) -> int:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def _dotted(path: tuple[str | int, ...]) -> str:
    text = ""
    for one in path:
        text += f"[{one}]" if isinstance(one, int) else f".{one}" if text else one
    return text
