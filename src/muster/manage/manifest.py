"""Manifests: reads YAML into checked specifications and reports errors by line and field.

    resources:
      - name: web-1
        type: process
        agent: host-a                  # or: where: "zone = 'east' AND disk = 'ssd'"
        group: web
        labels: {tier: front}
        depends_on: [db]               # a resource, or group:NAME for all of a group
        restart: {policy: always, attempts: 5}
        update: {max_parallel: 1, min_healthy_time_s: 10}
        config: {command: [python3, -m, http.server, "8080"]}
    topologies:
      - {name: mesh, shape: ring, size: 8, agent: host-a}

Pure.  Input is untrusted: size, depth and the number of nodes (which aliases multiply) are bounded.

A secret is a reference, ``{secret: "file:/run/keys/db"}`` or ``{secret: "env:DB_PASSWORD"}`` of the agent's
machine, or ``{secret: "store:db-password"}`` (`secrets`).  The agent resolves it; a manifest never contains
its value.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import msgspec
import yaml

from muster.core import errors, subjects
from muster.core.formats import yaml as yaml_
from muster.core.settings import sections
from muster.manage import dependencies, protocol, topologies
from muster.predicates.syntax import parser

doc = sections.field_doc

BYTES_MAX = 4 << 20
PACKED_FROM_BYTES = 256 << 10  # entries of more bytes are sent compressed, so that they fit into one message
ENTRIES_BYTES_MAX = 16 << 20  # with all defaults
NODES_MAX = 200_000
DEPTH_MAX = 40
GROUP = "group:"
REFERENCE_HINT = 'refer to it: {secret: "file:PATH"}, {secret: "env:NAME"} or {secret: "store:NAME"}'

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,128}$(?!\n)")]
Check = Callable[[Mapping[str, Any]], None]
_PATH = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")
REFERENCES = ("file:", "env:", "store:")
_SECRET = re.compile(r"(?i)(password|passwd|secret|token|api_?key|private_?key)$")


class ManifestError(errors.InvalidInput):
    """``line`` and ``field`` are the position in the manifest."""

    code = "bad-manifest"

    def __init__(self, message: str, *, line: int, field: str, hint: str | None = None) -> None:
        super().__init__(f"line {line}, {field or 'manifest'}: {message}", hint=hint)
        self.line = line
        self.field = field


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A resource: what it is, where it runs, and how it is kept in its desired state."""

    name: Annotated[Name, doc("Its name, unique in the domain.")]
    type: Annotated[Name, doc("The type of resource, which determines `config` (see below).")]
    agent: Annotated[Name | None, doc("The agent that hosts it. Exactly one of `agent` and `where`.")] = None
    where: Annotated[
        str | None,
        doc(
            "Predicate over agents: their name, zone, labels and facts. When the manifest is applied, the "
            "matching agent with the fewest resources is selected."
        ),
    ] = None
    config: Annotated[dict[str, Any], doc("Its configuration; the fields depend on the type.")] = {}
    group: Annotated[Name, doc("The group it belongs to, for predicates and `depends_on`.")] = "default"
    labels: Annotated[dict[Name, str], doc("Names and values for predicates.")] = {}
    depends_on: Annotated[
        tuple[str, ...],
        doc("Resources, or group:NAME for all of a group, that are started before it and stopped after it."),
    ] = ()
    desired: Annotated[
        protocol.DesiredState, doc("Desired state; drained: finish current work, then stop.")
    ] = protocol.DesiredState.UP
    restart: Annotated[protocol.RestartPolicy, doc("When a failed resource is restarted.")] = msgspec.field(
        default_factory=protocol.RestartPolicy
    )
    update: Annotated[
        protocol.UpdatePolicy | None,
        doc("How the resources of its group change to a new version. Without it they change at once."),
    ] = None


class ManifestDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A manifest: resources, and networks of brokers."""

    resources: Annotated[tuple[ManifestEntry, ...], doc("The resources.")] = ()
    topologies: Annotated[
        tuple[topologies.Topology, ...],
        doc("Networks of brokers; each becomes one resource of the type broker per broker."),
    ] = ()


Lines = dict[tuple[str | int, ...], int]


def read(text: str, checks: Mapping[str, Check]) -> list[ManifestEntry]:
    """The entries of a manifest, with expanded topologies and checked dependencies. Raises `ManifestError`.

    ``checks`` contains a function for each known type that rejects an invalid configuration with an error
    that names a path.
    """
    if len(text.encode()) > BYTES_MAX:
        raise errors.LimitExceeded(f"the manifest exceeds {BYTES_MAX} bytes: split it")
    lines: Lines = {}
    plain = _to_plain(_compose(text), lines)
    try:
        document = msgspec.convert(plain, ManifestDocument)
    except msgspec.ValidationError as error:
        raise _manifest_error(str(error), lines) from error
    entries = [_checked(entry, number, checks, lines) for number, entry in enumerate(document.resources)]
    places: dict[str, tuple[str | int, ...]] = {
        entry.name: ("resources", number) for number, entry in enumerate(entries)
    }
    for number, topology in enumerate(document.topologies):
        path = ("topologies", number)
        try:
            expanded = [msgspec.convert(entry, ManifestEntry) for entry in topologies.expand(topology)]
        except errors.InvalidInput as error:
            raise ManifestError(error.message, line=_line(lines, path), field=_dotted(path)) from error
        for entry in expanded:
            places.setdefault(entry.name, path)
        entries += expanded
    _require_distinct(entries, places, lines)
    _require_acyclic(entries, places, lines)
    return entries


def specification(
    entry: ManifestEntry, agent: str, names_of: Callable[[str], Iterable[str]]
) -> protocol.ResourceSpec:
    """``names_of`` returns the members of a group, for dependencies on the complete group."""
    needed: dict[str, None] = {}
    for dependency in entry.depends_on:
        names = (
            sorted(names_of(dependency.removeprefix(GROUP))) if dependency.startswith(GROUP) else [dependency]
        )
        needed |= dict.fromkeys(names)
        if len(needed.keys() - {entry.name}) > protocol.DEPENDENCIES_MAX:
            raise too_many_dependencies(entry.name)
    return protocol.ResourceSpec(
        name=entry.name,
        type=entry.type,
        agent=agent,
        config=entry.config,
        group=entry.group,
        labels=entry.labels,
        depends_on=tuple(dict.fromkeys(name for name in needed if name != entry.name)),
        desired=entry.desired,
        restart=entry.restart,
        digest=digest(entry.config),
        update=entry.update,
    )


def too_many_dependencies(name: str) -> errors.LimitExceeded:
    return errors.LimitExceeded(
        f"{name!r} depends on more than {protocol.DEPENDENCIES_MAX} resources",
        hint="depend on a smaller group, or on one resource that depends on the others",
    )


def digest(config: Mapping[str, Any]) -> str:
    """The same for equal configurations, however they were written."""
    return hashlib.sha256(msgspec.json.encode(dict(config), order="deterministic")).hexdigest()[:16]


# On the wire

Entries = list[Any] | str  # packed, if they are many


def pack_entries(entries: list[Any]) -> Entries:
    """Entries for one message: all of them are applied, or none."""
    data = msgspec.json.encode(entries)
    return entries if len(data) < PACKED_FROM_BYTES else base64.b64encode(zlib.compress(data)).decode()


def unpack_entries(entries: Entries) -> list[Any]:
    if isinstance(entries, list):
        return entries
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(entries, validate=True), ENTRIES_BYTES_MAX)
        if unpacker.unconsumed_tail:
            raise errors.LimitExceeded(f"the entries exceed {ENTRIES_BYTES_MAX} bytes: split the manifest")
        return msgspec.json.decode(data, type=list[Any])
    except (ValueError, zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise errors.InvalidInput(f"the packed entries cannot be read: {error}") from error


# Reading


def _compose(text: str) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml_.loader())
        return node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ManifestError(
            f"not YAML: {error.problem or error.context}", line=(mark.line + 1) if mark else 1, field=""
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ManifestError(f"not YAML: {error}", line=1, field="") from error


def _to_plain(root: yaml.Node | None, lines: Lines) -> Any:
    constructor = yaml.SafeLoader("")
    left = NODES_MAX

    def walk(node: yaml.Node, path: tuple[str | int, ...]) -> Any:
        nonlocal left
        left -= 1
        line = node.start_mark.line + 1
        if left < 0 or len(path) > DEPTH_MAX:
            raise ManifestError(
                "the manifest is too large after its aliases are expanded", line=line, field=""
            )
        lines.setdefault(path, line)
        if isinstance(node, yaml.MappingNode):
            mapping: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = key_node.value
                if not isinstance(key, str) or key in mapping:
                    problem = (
                        f"duplicate field {key!r}"
                        if isinstance(key, str)
                        else "the field name is not a string"
                    )
                    raise ManifestError(problem, line=key_node.start_mark.line + 1, field=_dotted(path))
                lines[(*path, key)] = key_node.start_mark.line + 1
                mapping[key] = walk(value_node, (*path, key))
            return mapping
        if isinstance(node, yaml.SequenceNode):
            return [walk(child, (*path, number)) for number, child in enumerate(node.value)]
        try:
            value = constructor.construct_object(node)
        except (yaml.YAMLError, ValueError, AttributeError) as error:
            raise ManifestError(f"cannot be read: {error}", line=line, field=_dotted(path)) from error
        if not isinstance(value, str | int | float | bool | None):
            raise ManifestError(
                "dates and binary values are not supported: quote it", line=line, field=_dotted(path)
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
        hint = f"did you mean {near[0]!r}?" if near else f"available: {', '.join(sorted(checks))}"
        raise refuse("type", f"no type {entry.type!r}", hint)
    if (entry.agent is None) == (entry.where is None):
        raise refuse("agent", "exactly one of `agent: NAME` and `where: EXPRESSION` is required")
    if entry.where is not None:
        try:
            parser.parse(entry.where)
        except errors.MusterError as error:
            raise refuse("where", error.message, error.hint) from error
    for dependency in entry.depends_on:
        try:
            subjects.token(dependency.removeprefix(GROUP))
        except errors.InvalidInput as error:
            raise refuse("depends_on", error.message) from error
    secret_path = find_plaintext_secret(entry.config)
    if secret_path is not None:
        where = ("config", *secret_path)
        raise ManifestError(
            "a manifest must not contain the value of a secret",
            line=_line(lines, (*path, *where)),
            field=_dotted((*path, *where)),
            hint=REFERENCE_HINT,
        )
    try:
        checks[entry.type](entry.config)
    except (errors.InvalidInput, msgspec.ValidationError) as error:
        raise _manifest_error(str(error), lines, (*path, "config")) from error
    return entry


def find_plaintext_secret(config: Any, path: tuple[str | int, ...] = ()) -> tuple[str | int, ...] | None:
    """The path of a plain text value whose name indicates a secret."""
    inside: Iterable[tuple[str | int, Any]] = ()
    if isinstance(config, dict):
        inside = config.items()
    elif isinstance(config, list):
        inside = enumerate(config)
    for key, value in inside:
        referred = key == "secret" and isinstance(value, str) and value.startswith(REFERENCES)
        if isinstance(key, str) and isinstance(value, str) and _SECRET.search(key) and not referred:
            return (*path, key)
        inner_path = find_plaintext_secret(value, (*path, key))
        if inner_path is not None:
            return inner_path
    return None


def _require_distinct(
    entries: list[ManifestEntry], places: Mapping[str, tuple[str | int, ...]], lines: Lines
) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            path = (*places[entry.name], "name")
            raise ManifestError(
                f"duplicate name {entry.name!r}", line=_line(lines, path), field=_dotted(path)
            )
        seen.add(entry.name)


def _require_acyclic(
    entries: list[ManifestEntry], places: Mapping[str, tuple[str | int, ...]], lines: Lines
) -> None:
    groups: dict[str, list[str]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry.name)
    needs: dict[str, list[str]] = {}
    for entry in entries:
        named = [
            groups.get(name.removeprefix(GROUP), []) for name in entry.depends_on if name.startswith(GROUP)
        ]
        itself = f"{GROUP}{entry.group}" in entry.depends_on
        if sum(map(len, named)) - itself > protocol.DEPENDENCIES_MAX:
            path = (*places[entry.name], "depends_on")
            error = too_many_dependencies(entry.name)
            raise ManifestError(error.message, line=_line(lines, path), field=_dotted(path), hint=error.hint)
        needs[entry.name] = [name for names in named for name in names if name != entry.name]
        needs[entry.name] += [name for name in entry.depends_on if not name.startswith(GROUP)]
    cycle = dependencies.find_cycle(needs)
    if cycle is not None:
        path = (*places[cycle[0]], "depends_on")
        raise ManifestError(
            f"the dependencies form a cycle: {' -> '.join(cycle)}",
            line=_line(lines, path),
            field=_dotted(path),
        )


# Positions of errors


def _manifest_error(message: str, lines: Lines, base: tuple[str | int, ...] = ()) -> ManifestError:
    """msgspec reports ``Expected `int` … - at `$.resources[0].restart.attempts```."""
    problem, _, where = message.partition(" - at `$")
    path = base
    for name, index in _PATH.findall(where.rstrip("`")):
        path = (*path, name if name else int(index) if index else "…")
    field = re.search(r"unknown field `([^`]+)`", problem)
    if field:
        path = (*path, field[1])
    return ManifestError(problem, line=_line(lines, path), field=_dotted(path))


def _line(lines: Lines, path: tuple[str | int, ...]) -> int:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def _dotted(path: tuple[str | int, ...]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
