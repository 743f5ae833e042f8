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
      - name: worker                   # worker-1, worker-2, worker-3
        type: process
        count: 3
        where: "zone <> 'office'"
        placement: {cpu: 0.5, memory_mb: 256, anti_affinity: "group = 'worker'"}
        group: worker
        reschedule: {after_s: 20}      # on another machine, if its own is lost
        config: {command: [worker, --port, "{8000+index}", --zone, "{zone}"]}
      - name: backup
        type: process
        where: "disk = 'ssd'"
        schedule: {cron: "30 2 * * *", time_zone: Europe/Berlin}
        config: {command: [backup]}
    topologies:
      - {name: mesh, shape: ring, size: 8, agent: host-a}

Pure.  Input is untrusted: size, depth and the number of nodes (which aliases multiply) are bounded.

A secret is a reference, ``{secret: "file:/run/keys/db"}`` or ``{secret: "env:DB_PASSWORD"}`` of the agent's
machine, or ``{secret: "store:db-password"}`` (`secrets`).  The agent resolves it; a manifest never contains
its value.
"""

from __future__ import annotations

import base64
import functools
import graphlib
import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import yaml

from muster.core import errors, subjects
from muster.core.formats import yaml as yaml_
from muster.core.settings import sections
from muster.manage import cron, field_hints, protocol, topologies
from muster.predicates.syntax import parser

doc = sections.field_doc

BYTES_MAX = 4 << 20
PACKED_FROM_BYTES = 256 << 10  # entries of more bytes are sent compressed, so that they fit into one message
ENTRIES_BYTES_MAX = 16 << 20  # with all defaults
NODES_MAX = 200_000
DEPTH_MAX = 40
GROUP = "group:"
DEFAULT_GROUP = "default"
REFERENCE_HINT = 'refer to it: {secret: "file:PATH"}, {secret: "env:NAME"} or {secret: "store:NAME"}'

NAME_MAX = 128
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,128}$(?!\n)")]
Check = Callable[[Mapping[str, Any]], None]
RUN_SUFFIX_MAX = 24  # of the name of a run
REFERENCES = ("file:", "env:", "store:")
_PLACEHOLDER = re.compile(r"\{(?:(?:(\d{1,9})\+)?index|(zone|agent|name))\}")
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

    name: Annotated[Name, doc("Its name, unique in the domain: at most 128 letters, digits, - and _.")]
    type: Annotated[Name, doc("The type of resource, which determines `config` (see below).")]
    agent: Annotated[Name | None, doc("The agent that hosts it. Exactly one of `agent` and `where`.")] = None
    where: Annotated[
        str | None,
        doc(
            "Predicate over agents: their name, zone, labels and facts. When the manifest is applied, the "
            "matching agent with the fewest resources is selected."
        ),
    ] = None
    count: (
        Annotated[
            int,
            doc(
                "Number of instances: NAME-1, NAME-2, …. In their labels and the texts of their `config`, "
                "{index}, {NUMBER+index}, {zone}, {agent} and {name} are replaced. Instances beyond it are "
                "deleted.",
                ge=0,
                le=1000,
            ),
        ]
        | None
    ) = None
    placement: Annotated[
        protocol.Placement | None,
        doc("How its agent is selected. With it or `count`, neither `agent` nor `where` is required."),
    ] = None
    config: Annotated[dict[str, Any], doc("Its configuration; the fields depend on the type.")] = {}
    group: Annotated[
        Name,
        doc(
            "The group it belongs to, for predicates, `depends_on` and updates; instances of an entry with a "
            "`count` belong to one of its name by default."
        ),
    ] = DEFAULT_GROUP
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
    reschedule: Annotated[
        protocol.ReschedulePolicy | None,
        doc(
            "Start it on another agent if its machine is lost. Not with `agent`, and only for types whose "
            "adapter supports it, such as process and container."
        ),
    ] = None
    hooks: Annotated[
        protocol.Hooks | None, doc("Commands that its agent executes after its start and before its stop.")
    ] = None
    job: Annotated[
        protocol.JobPolicy | None,
        doc(
            "It runs to its end, once for each version of its entry. Dependants start after its success. A "
            "failed run is repeated only if `restart` says so."
        ),
    ] = None
    schedule: Annotated[
        protocol.JobSchedule | None,
        doc("It is a periodic job. Without `agent`, an agent is selected for each run."),
    ] = None

    @property
    def group_name(self) -> str:
        is_own = self.count is not None and self.group == DEFAULT_GROUP
        return self.name if is_own else self.group


class ManifestDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A manifest: resources, and networks of brokers."""

    resources: Annotated[tuple[ManifestEntry, ...], doc("The resources.")] = ()
    topologies: Annotated[
        tuple[topologies.Topology, ...],
        doc("Networks of brokers; each becomes one resource of the type broker per broker."),
    ] = ()


Lines = dict[tuple[str | int, ...], int]


def read(
    text: str,
    checks: Mapping[str, Check],
    can_move: Callable[[str], bool] = lambda type: True,
    has_hooks: Callable[[str], bool] = lambda type: True,
) -> list[ManifestEntry]:
    """The entries of a manifest, with expanded topologies and checked dependencies. Raises `ManifestError`.

    ``checks`` contains a function for each known type that rejects an invalid configuration with an error
    that names a path. ``can_move``: whether resources of a type can be started on another machine.
    ``has_hooks``: whether they run hooks.
    """
    if len(text.encode()) > BYTES_MAX:
        raise errors.LimitExceeded(f"the manifest exceeds {BYTES_MAX} bytes: split it")
    lines: Lines = {}
    plain = _to_plain(_compose(text), lines)
    try:
        document = msgspec.convert(plain, ManifestDocument)
    except msgspec.ValidationError as error:
        hint = field_hints.hint(ManifestDocument, str(error))
        raise _manifest_error(str(error), lines, hint=hint) from error
    entries = [_checked(entry, number, checks, lines) for number, entry in enumerate(document.resources)]
    for number, entry in enumerate(entries):
        _check_move_and_job(entry, number, entries, lines, can_move)
        if entry.hooks is not None and not has_hooks(entry.type):
            message = f"resources of the type {entry.type!r} have no hooks"
            raise _refusal(lines, number, "hooks", message, "processes and containers have hooks")
    places: dict[str, tuple[str | int, ...]] = {
        entry.name: ("resources", number) for number, entry in enumerate(entries)
    }
    for number, topology in enumerate(document.topologies):
        path: tuple[str | int, ...] = ("topologies", number)
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


def instances(name: str, count: int | None) -> list[tuple[str, int]]:
    """Names and indexes of the resources of an entry. Without a `count` it is the only one, with the index
    0."""
    if count is None:
        return [(name, 0)]
    return [(f"{name}-{index}", index) for index in range(1, count + 1)]


def resource_names(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the resources of plain entries."""
    return [name for entry in entries for name, _ in instances(entry["name"], entry.get("count"))]


def specification(
    entry: ManifestEntry,
    agent: str,
    names_of: Callable[[str], Iterable[str]],
    *,
    name: str = "",
    index: int = 0,
    zone: str = "",
) -> protocol.ResourceSpec:
    """Of the instance ``name``. ``names_of`` returns the resources of a dependency: the members of a group,
    the instances of an entry, or the resource itself."""
    name = name or entry.name
    needed: dict[str, None] = {}
    for dependency in entry.depends_on:
        needed |= dict.fromkeys(names_of(dependency))
        if len(needed.keys() - {name}) > protocol.DEPENDENCIES_MAX:
            raise too_many_dependencies(name)
    config, labels = entry.config, entry.labels
    template: protocol.Values = {}
    if index:
        template = {"config": config, "labels": labels}
        filled, elsewhere = (
            fill(template, index, {"zone": where[0], "agent": where[1], "name": name})
            for where in ((zone, agent), ("", ""))
        )
        config, labels = filled["config"], filled["labels"]
        template = template if entry.reschedule and filled != elsewhere else {}
    update = entry.update or (protocol.UpdatePolicy() if index else None)
    restart = entry.restart
    if entry.job is not None or entry.schedule is not None:  # it is not restarted unless that is said
        policy: Literal["never", "on-failure"] = (
            "never" if restart == protocol.RestartPolicy() else "on-failure"
        )
        if restart.policy == "always":
            restart = msgspec.structs.replace(restart, policy=policy)
    where = entry.where or ""
    if entry.schedule is not None and entry.agent is not None:
        where = f"agent = '{entry.agent}'"
    return protocol.ResourceSpec(
        name=name,
        type=entry.type,
        agent=agent,
        config=config,
        group=entry.group_name,
        labels=labels,
        depends_on=tuple(need for need in needed if need != name),
        desired=entry.desired,
        restart=restart,
        digest=digest(config, entry.hooks),
        update=update,
        placement=entry.placement,
        reschedule=entry.reschedule,
        hooks=entry.hooks,
        job=entry.job or (protocol.JobPolicy() if entry.schedule else None),
        schedule=entry.schedule,
        where=where if entry.reschedule or entry.schedule else "",
        template=template,
        entry=entry.name if index else "",
        index=index,
    )


def placed(spec: protocol.ResourceSpec, agent: str, zone: str) -> protocol.ResourceSpec:
    """The specification on another agent."""
    config, labels = spec.config, spec.labels
    if spec.template:
        filled = fill(spec.template, spec.index, {"zone": zone, "agent": agent, "name": spec.name})
        config, labels = filled["config"], filled["labels"]
    return msgspec.structs.replace(
        spec, agent=agent, config=config, labels=labels, digest=digest(config, spec.hooks)
    )


def fill(value: Any, index: int, values: Mapping[str, str]) -> Any:
    """The value with the placeholders of its texts replaced; other braces stay."""
    if isinstance(value, dict):
        return {key: fill(inner, index, values) for key, inner in value.items()}
    if isinstance(value, list):
        return [fill(inner, index, values) for inner in value]
    if not isinstance(value, str) or "{" not in value:
        return value
    return _PLACEHOLDER.sub(
        lambda match: values[match[2]] if match[2] else str(int(match[1] or 0) + index), value
    )


def too_many_dependencies(name: str) -> errors.LimitExceeded:
    return errors.LimitExceeded(
        f"{name!r} depends on more than {protocol.DEPENDENCIES_MAX} resources",
        hint="depend on a smaller group, or on one resource that depends on the others",
    )


def digest(config: Mapping[str, Any], hooks: protocol.Hooks | None = None) -> str:
    """The same for equal configurations, however they were written."""
    data = msgspec.json.encode(dict(config), order="deterministic")
    return hashlib.sha256(data + (msgspec.json.encode(hooks) if hooks else b"")).hexdigest()[:16]


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
    refuse = functools.partial(_refusal, lines, number)
    if entry.type not in checks:
        raise refuse("type", f"no type {entry.type!r}", field_hints.nearest(entry.type, sorted(checks)))
    is_anywhere = entry.count is not None or entry.placement is not None
    if (entry.agent is None) == (entry.where is None) and not (entry.agent is None and is_anywhere):
        raise refuse("agent", "exactly one of `agent: NAME` and `where: EXPRESSION` is required")
    placement = entry.placement or protocol.Placement()
    predicates = {
        ("where",): entry.where,
        ("placement", "affinity"): placement.affinity,
        ("placement", "anti_affinity"): placement.anti_affinity,
    }
    for field, predicate in predicates.items():
        try:
            parser.parse(predicate) if predicate is not None else None
        except errors.MusterError as error:
            raise refuse(".".join(field), error.message, error.hint) from error
    if (update := entry.update) is not None and update.min_healthy_time_s >= update.healthy_deadline_s:
        raise refuse(
            "update.healthy_deadline_s",
            f"no update can succeed: a resource has to be up for {update.min_healthy_time_s:g} s within "
            f"{update.healthy_deadline_s:g} s",
            "a deadline that is longer than `min_healthy_time_s` and the start together",
        )
    if entry.count and len(f"{entry.name}-{entry.count}") > NAME_MAX:
        raise refuse("name", f"with the numbers of its instances it is longer than {NAME_MAX} characters")
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
        example = {"zone": "zone", "agent": "agent", "name": f"{entry.name}-1"}
        checks[entry.type](fill(entry.config, 1, example) if entry.count is not None else entry.config)
    except (errors.InvalidInput, msgspec.ValidationError) as error:
        hint = error.hint if isinstance(error, errors.InvalidInput) else None
        raise _manifest_error(str(error), lines, (*path, "config"), hint) from error
    return entry


def _check_move_and_job(
    entry: ManifestEntry,
    number: int,
    entries: list[ManifestEntry],
    lines: Lines,
    can_move: Callable[[str], bool],
) -> None:
    refuse = functools.partial(_refusal, lines, number)
    if entry.reschedule is not None and entry.config.get("pid_file"):
        raise refuse("config.pid_file", "a process that may move cannot be adopted", "remove `reschedule`")
    if entry.reschedule is not None:
        if entry.agent is not None:
            raise refuse(
                "reschedule",
                f"it is bound to the agent {entry.agent!r}, so it cannot move",
                "use `where` or `placement` instead of `agent`",
            )
        if not can_move(entry.type):
            raise refuse(
                "reschedule",
                f"resources of the type {entry.type!r} cannot move: they may outlive an agent that is frozen",
                "remove `reschedule`",
            )
    is_job = entry.job is not None or entry.schedule is not None
    is_given = ("resources", number, "restart", "policy") in lines  # it is the default, too
    if is_job and is_given and entry.restart.policy == "always":
        raise refuse("restart.policy", "a job ends, so it is not always restarted", "use on-failure or never")
    if is_job and entry.desired is protocol.DesiredState.DRAINED:
        raise refuse("desired", "a job is not drained", "use down, and up to run it")
    if entry.schedule is None:
        return
    for field in ("count", "update", "depends_on"):
        if getattr(entry, field) not in (None, ()):
            raise refuse(field, "a periodic job has none: each run is a resource of its own")
    if len(entry.name) > NAME_MAX - RUN_SUFFIX_MAX:
        raise refuse("name", f"with the times of its runs it is longer than {NAME_MAX} characters")
    try:
        cron.parse("@daily", entry.schedule.time_zone)
    except errors.InvalidInput as error:
        raise refuse("schedule.time_zone", error.message, error.hint) from error
    try:
        cron.parse(entry.schedule.cron, entry.schedule.time_zone)
    except errors.InvalidInput as error:
        raise refuse("schedule.cron", error.message, error.hint) from error
    for other_number, other in enumerate(entries):
        if entry.name in other.depends_on:
            message = f"{entry.name!r} is a periodic job, which nothing can depend on"
            raise _refusal(lines, other_number, "depends_on", message, "depend on a job without a `schedule`")


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
        for name in dict.fromkeys([entry.name, *(name for name, _ in instances(entry.name, entry.count))]):
            if name in seen:
                path = (*places[entry.name], "name")
                raise ManifestError(f"duplicate name {name!r}", line=_line(lines, path), field=_dotted(path))
            seen.add(name)


def _require_acyclic(
    entries: list[ManifestEntry], places: Mapping[str, tuple[str | int, ...]], lines: Lines
) -> None:
    groups: dict[str, list[str]] = {}
    for entry in entries:
        groups.setdefault(entry.group_name, []).append(entry.name)
    needs: dict[str, list[str]] = {}
    for entry in entries:
        named = [
            groups.get(name.removeprefix(GROUP), []) for name in entry.depends_on if name.startswith(GROUP)
        ]
        itself = f"{GROUP}{entry.group_name}" in entry.depends_on
        if sum(map(len, named)) - itself > protocol.DEPENDENCIES_MAX:
            path = (*places[entry.name], "depends_on")
            error = too_many_dependencies(entry.name)
            raise ManifestError(error.message, line=_line(lines, path), field=_dotted(path), hint=error.hint)
        needs[entry.name] = [name for names in named for name in names if name != entry.name]
        needs[entry.name] += [name for name in entry.depends_on if not name.startswith(GROUP)]
    cycle = find_cycle(needs)
    if cycle is not None:
        path = (*places[cycle[0]], "depends_on")
        raise ManifestError(
            f"the dependencies form a cycle: {' -> '.join(cycle)}",
            line=_line(lines, path),
            field=_dotted(path),
        )


# Positions of errors


def _refusal(lines: Lines, number: int, field: str, message: str, hint: str | None = None) -> ManifestError:
    """Of a field of an entry, such as ``placement.affinity``."""
    path: tuple[str | int, ...] = ("resources", number, *field.split("."))
    return ManifestError(message, line=_line(lines, path), field=_dotted(path), hint=hint)


def _manifest_error(
    message: str, lines: Lines, base: tuple[str | int, ...] = (), hint: str | None = None
) -> ManifestError:
    problem, where = field_hints.split(message)
    path = (*base, *where)
    return ManifestError(problem, line=_line(lines, path), field=_dotted(path), hint=hint)


def _line(lines: Lines, path: tuple[str | int, ...]) -> int:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


# The order of dependencies


def find_cycle(needs: Mapping[str, Iterable[str]]) -> list[str] | None:
    """Names that depend on each other in a cycle, first and last the same; None if there is no cycle."""
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        cycle: list[str] = list(reversed(error.args[1]))
        return cycle
    return None


def dependency_waves(needs: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Names in execution order; the names of one wave can be processed at the same time."""
    known = {name: [other for other in others if other in needs] for name, others in needs.items()}
    sorter = graphlib.TopologicalSorter(known)
    sorter.prepare()
    waves = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        waves.append(ready)
        sorter.done(*ready)
    return waves


def _dotted(path: tuple[str | int, ...]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
