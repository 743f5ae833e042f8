"""The reference page of subjects and messages, generated from the protocol docstrings and the roles."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import msgspec

from muster.app.components import bootstrap_client
from muster.app.operations import audit
from muster.bus.brokers import control
from muster.core import messages, subjects
from muster.core.reports import columns
from muster.core.settings import sections as settings_sections
from muster.inform import protocol as inform
from muster.manage import protocol as managing
from muster.message import listings
from muster.message import protocol as message
from muster.message.dispatcher.peers import peer_protocol as message_peers
from muster.monitor import protocol as monitor
from muster.notify import protocol as notify
from muster.pipeline import protocol as pipeline
from muster.trust.permissions import roles

#: A title, and the modules whose docstrings list subjects and whose structs are the messages.
PARTS: dict[str, tuple[ModuleType, ...]] = {
    "Monitoring": (monitor,),
    "Pipeline": (pipeline,),
    "Notification": (notify,),
    "Management": (managing, bootstrap_client),
    "Information": (inform,),
    "Messages (JMS)": (message, listings, message_peers),
    "The domain itself": (control, audit),
}
SHARED = (messages, columns)

_HEAD = """\
# Subjects and messages

The messages between Muster's processes, and the roles that may publish and receive them. A user's topic `a/b`
is the broker's subject `topic.a.b` (over MQTT: `topic/a/b`); all other subjects begin with `muster.`, and the
position of a name shows its owner:

| subject | meaning |
|---|---|
| `muster.<part>.from.<identity>.…` | published only by that identity; the broker enforces it |
| `muster.<part>.to.<identity>.…` | received by that identity, published by the service's own processes |
| `muster.<part>.all.…` | published by the service's own processes to all identities of the domain |
| `muster.<part>.log.…` | stored by the service's own processes in its streams |
| `_R.@<part>.<identity>.…` | replies of the service's own processes to that identity's requests |
| `_R.<process>.<identity>.…` | replies of one process to that identity's requests to it (`to` subjects) |
| `_R.app.<identity>.…` | for any role with topics: replies on users' topics, messages of temporary topics |
| `_INBOX.<identity>.…` | messages of the broker itself to that identity; no identity may publish here |

In the tables, *subscribers* omits the addressee of a `to` subject, who always receives it, operators, who may
subscribe to everything, and links between brokers, which carry everything. Messages are JSON objects whose
`kind` contains a version, or the same in MessagePack, unless they are marked as arrays: then the fields are
in this order. Within a version, fields are only added, with a default; readers ignore unknown fields.
"""

_LINE = re.compile(r"^ {4}.*?(muster\.(?:<[^>]*>|\{[^}]*\}|\[[^\]]*\]|[^\s<>{}\[\]])+)\s*(.*)$")
_OTHER = "other-identity"
_EXCLUDED = (roles.Role.LINK, roles.Role.SYSTEM, roles.Role.JOINING, roles.Role.READER)


class Subject(NamedTuple):
    pattern: str
    meaning: str


def subjects_of(module: ModuleType) -> list[Subject]:
    """The subjects that a docstring lists."""
    listed: list[Subject] = []
    for line in inspect.cleandoc(module.__doc__ or "").splitlines():
        match = _LINE.match(line)
        if match:
            listed.append(Subject(match[1], " ".join(match[2].split())))
        elif listed and line.startswith(" " * 8) and line.strip():
            listed[-1] = Subject(listed[-1].pattern, f"{listed[-1].meaning} {line.strip()}")
    return listed


def publishers(pattern: str) -> str:
    """The roles that may publish it, from the permissions in their credentials."""
    is_own, sample = ".from." in pattern, _sample(pattern)
    able = set()
    for role in _roles():
        limits = roles.limits(role, "x" if is_own else _OTHER).pub
        allowed = any(subjects.matches(allowed_pattern, sample) for allowed_pattern in limits.allow)
        if allowed and not any(subjects.matches(denied, sample) for denied in limits.deny):
            able.add(role)
    all_roles = set(_roles())
    if able == all_roles:
        return "all, as themselves"
    if able == all_roles - {roles.Role.VIEWER}:
        return "all except viewers, as themselves"
    return _listed(able)


def subscribers(pattern: str) -> str:
    """The roles that may subscribe to it."""
    is_own, sample = ".from." in pattern, _sample(pattern)
    able = set()
    for role in _roles():
        limits = roles.limits(role, "x" if is_own else _OTHER).sub
        allowed = any(subjects.matches(allowed_pattern, sample) for allowed_pattern in limits.allow)
        if allowed and not any(subjects.matches(denied, sample) for denied in limits.deny):
            able.add(role)
    return "all" if able == set(_roles()) else _listed(able - {roles.Role.OPERATOR})


def structs_of(module: ModuleType) -> Iterator[type[msgspec.Struct]]:
    for name, kind in vars(module).items():
        ours = (
            isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
        )
        if ours and not name.startswith("_") and kind.__struct_fields__:
            yield kind


def render_page() -> str:
    sections = [_HEAD]
    for title, modules in PARTS.items():
        sections.append(
            f"\n## {title}\n\n| subject | meaning | publishers | subscribers |\n|---|---|---|---|\n"
        )
        for module in modules:
            for subject in subjects_of(module):
                row = (
                    f"`{subject.pattern}`",
                    _plain(subject.meaning),
                    publishers(subject.pattern),
                    subscribers(subject.pattern),
                )
                sections.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n")
        streams = [
            stream for module in modules for stream in roles.STREAMS.get(getattr(module, "PART", ""), ())
        ]
        if streams:
            sections.append(f"\nStreams: {', '.join(f'`{stream}`' for stream in dict.fromkeys(streams))}.\n")
        sections += [_struct(kind) for module in modules for kind in structs_of(module)]
    sections.append("\n## Messages of several services\n")
    sections += [_struct(kind) for module in SHARED for kind in structs_of(module)]
    return "".join(sections)


def _struct(kind: type[msgspec.Struct]) -> str:
    config = kind.__struct_config__
    named = [f"kind `{config.tag}`"] if config.tag and config.tag_field == "kind" else []
    named += [f"`{config.tag_field}`: `{config.tag}`"] if config.tag and config.tag_field != "kind" else []
    named += ["an array"] if config.array_like else []
    details = f" ({', '.join(named)})" if named else ""
    own = kind.__doc__ if kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(") else ""
    meaning = _plain(" ".join(inspect.cleandoc(own or "").split("\n\n")[0].split()))
    lines = [f"\n**{kind.__name__}**{details}{': ' + meaning if meaning else ''}\n\n"]
    for field in msgspec.structs.fields(kind):
        default = "" if field.required else f" = {_default(field)}"
        described = next(
            (meta.description for meta in settings_sections.metas(field.type) if meta.description), ""
        )
        note = f": {described}" if described else ""
        lines.append(f"- `{field.encode_name}: {_annotation(kind, field.name)}{default}`{note}\n")
    return "".join(lines)


_DESCRIBED = re.compile(r"""\bdoc\((?:'[^']*'|"[^"]*"),? ?""")


def _annotation(kind: type, field: str) -> str:
    owner = next(base for base in kind.__mro__ if field in vars(base).get("__annotations__", {}))
    text = str(vars(owner)["__annotations__"][field])
    text = _DESCRIBED.sub("Meta(", text)  # the description is shown after the field
    return re.sub(r"\bmsgspec\.|\bmessages\.", "", text)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is msgspec.NODEFAULT:
        made = field.default_factory
        return repr(made()) if made in (list, dict, set, tuple) else "…"
    value = getattr(field.default, "value", field.default)
    return "…" if isinstance(value, msgspec.Raw) else repr(value)


def _sample(pattern: str) -> str:
    plain = re.sub(r"\[[^\]]*\]", "", pattern)
    plain = re.sub(r"\{([^,}]*)[^}]*\}", r"\1", plain)
    return re.sub(r"<[^>]*>", "x", plain)


def _roles() -> list[roles.Role]:
    return [role for role in roles.Role if role not in _EXCLUDED]


def _listed(able: set[roles.Role]) -> str:
    return ", ".join(role.value for role in roles.Role if role in able) or "none"


def _plain(text: str) -> str:
    return text.replace("``", "`")
