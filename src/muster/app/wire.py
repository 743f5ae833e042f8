"""The reference page of subjects and messages, made from the protocols' own words and the table of roles.

A test compares it with docs/reference/wire.md; ``REWRITE=1 pytest tests/app/test_wire.py`` writes it anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import msgspec

from muster.app.components import management
from muster.app.operations import audit, control
from muster.core import messages, subjects
from muster.core.reports import columns
from muster.inform import protocol as inform
from muster.manage import protocol as managing
from muster.message import protocol as message
from muster.monitor import protocol as monitor
from muster.notify import protocol as notify
from muster.pipeline import protocol as pipeline
from muster.trust.permissions import roles

#: A title, and the modules whose docstrings list subjects and whose structs are the messages.
PARTS: dict[str, tuple[ModuleType, ...]] = {
    "Monitoring": (monitor,),
    "Pipeline": (pipeline,),
    "Notification": (notify,),
    "Management": (managing, management),
    "Information": (inform,),
    "Messages (JMS)": (message,),
    "The domain itself": (control, audit),
}
SHARED = (messages, columns)

_HEAD = """\
# Subjects and messages

<!-- Made from the code: REWRITE=1 pytest tests/app/test_wire.py -->

What travels between Muster's processes, and who may say and hear it. A user's topic `a/b` is the broker's
subject `topic.a.b` (over MQTT: `topic/a/b`); everything else begins with `muster.`, and a name's position
says whose it is:

| subject | is |
|---|---|
| `muster.<part>.from.<identity>.…` | said by that identity and nobody else: the broker sees to it |
| `muster.<part>.to.<identity>.…` | heard by that identity, and said by the part's own processes |
| `muster.<part>.all.…` | said by the part's own processes to everyone in the domain |
| `muster.<part>.log.…` | kept by the part's own processes in its streams |
| `_R.@<part>.<identity>.…` | replies of the part's own processes to that identity's requests to the part |
| `_R.<process>.<identity>.…` | replies of one process to that identity's requests to it (`to` subjects) |
| `_R.app.<identity>.…` | of any role with topics: replies on users' topics, messages of temporary topics |
| `_INBOX.<identity>.…` | what the broker itself sends to that identity: published by no identity |

In the tables, *hears* leaves out the addressee of a `to` subject, who always hears it, operators, who may
listen to everything, and links between brokers, which carry everything. Messages are JSON objects whose
`kind` carries a version, or the same in MessagePack, unless a line says that they are arrays: then fields
stand in this order. Within a version fields are only ever added, with a default; readers ignore those they do
not know.
"""

_LINE = re.compile(r"^ {4}.*?(muster\.(?:<[^>]*>|\{[^}]*\}|\[[^\]]*\]|[^\s<>{}\[\]])+)\s*(.*)$")
_OTHER = "somebody-else"
_APART = (roles.Role.LINK, roles.Role.SYSTEM, roles.Role.JOINING)


class Subject(NamedTuple):
    pattern: str
    meaning: str


def subjects_of(module: ModuleType) -> list[Subject]:
    """Those that its docstring lists."""
    found: list[Subject] = []
    for line in inspect.cleandoc(module.__doc__ or "").splitlines():
        match = _LINE.match(line)
        if match:
            found.append(Subject(match[1], " ".join(match[2].split())))
        elif found and line.startswith(" " * 8) and line.strip():
            found[-1] = Subject(found[-1].pattern, f"{found[-1].meaning} {line.strip()}")
    return found


def publishers(pattern: str) -> str:
    """Who may say it, from the permissions that credentials carry."""
    said, sample = ".from." in pattern, _sample(pattern)
    able = set()
    for role in _roles():
        limits = roles.limits(role, "x" if said else _OTHER).pub
        allowed = any(subjects.matches(one, sample) for one in limits.allow)
        if allowed and not any(subjects.matches(one, sample) for one in limits.deny):
            able.add(role)
    everyone = set(_roles())
    if able == everyone:
        return "everyone, as itself"
    if able == everyone - {roles.Role.VIEWER}:
        return "everyone but a viewer, as itself"
    return _listed(able)


def subscribers(pattern: str) -> str:
    said, sample = ".from." in pattern, _sample(pattern)
    able = set()
    for role in _roles():
        limits = roles.limits(role, "x" if said else _OTHER).sub
        heard = any(subjects.matches(one, sample) for one in limits.allow)
        if heard and not any(subjects.matches(one, sample) for one in limits.deny):
            able.add(role)
    return "everyone" if able == set(_roles()) else _listed(able - {roles.Role.OPERATOR})


def structs_of(module: ModuleType) -> Iterator[type[msgspec.Struct]]:
    for name, kind in vars(module).items():
        ours = (
            isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
        )
        if ours and not name.startswith("_") and kind.__struct_fields__:
            yield kind


def page() -> str:
    parts = [_HEAD]
    for title, modules in PARTS.items():
        parts.append(f"\n## {title}\n\n| subject | what | says | hears |\n|---|---|---|---|\n")
        for module in modules:
            for one in subjects_of(module):
                row = (
                    f"`{one.pattern}`",
                    _plain(one.meaning),
                    publishers(one.pattern),
                    subscribers(one.pattern),
                )
                parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n")
        kept = [stream for module in modules for stream in roles.STREAMS.get(getattr(module, "PART", ""), ())]
        if kept:
            parts.append(f"\nStreams: {', '.join(f'`{stream}`' for stream in dict.fromkeys(kept))}.\n")
        parts += [_struct(kind) for module in modules for kind in structs_of(module)]
    parts.append("\n## Messages that several parts read\n")
    parts += [_struct(kind) for module in SHARED for kind in structs_of(module)]
    return "".join(parts)


def _struct(kind: type[msgspec.Struct]) -> str:
    config = kind.__struct_config__
    named = [f"kind `{config.tag}`"] if config.tag and config.tag_field == "kind" else []
    named += [f"`{config.tag_field}`: `{config.tag}`"] if config.tag and config.tag_field != "kind" else []
    named += ["an array"] if config.array_like else []
    told = f" ({', '.join(named)})" if named else ""
    own = kind.__doc__ if kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(") else ""
    meaning = _plain(" ".join(inspect.cleandoc(own or "").split("\n\n")[0].split()))
    lines = [f"\n**{kind.__name__}**{told}{': ' + meaning if meaning else ''}\n\n"]
    for field in msgspec.structs.fields(kind):
        default = "" if field.required else f" = {_default(field)}"
        lines.append(f"- `{field.encode_name}: {_annotation(kind, field.name)}{default}`\n")
    return "".join(lines)


def _annotation(kind: type, field: str) -> str:
    owner = next(base for base in kind.__mro__ if field in vars(base).get("__annotations__", {}))
    text = str(vars(owner)["__annotations__"][field])
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
    return [role for role in roles.Role if role not in _APART]


def _listed(found: set[roles.Role]) -> str:
    return ", ".join(role.value for role in roles.Role if role in found) or "nobody else"


def _plain(text: str) -> str:
    return text.replace("``", "`")
