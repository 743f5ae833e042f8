"""Names of the running domain, for the completion of arguments, and for hints after misspelt ones.

A parameter has ``shell_complete=live_names.RESOURCES``. A completion must be quick and silent: it imports no
more than it needs, waits at most `PATIENCE_S`, and offers nothing while the domain does not respond.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection

if TYPE_CHECKING:
    from muster.bus import api
    from muster.trust import keyring

PATIENCE_S = 2.0
OFFERED_MAX = 200
SIMILAR_MAX = 2

#: Of a connection, the text begun and the words of the command line before it.
Source = Callable[["api.Bus", str, dict[str, Any]], Awaitable[Iterable[str]]]
Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def _completer(*sources: Source) -> Completer:
    """The names of all ``sources`` that begin with the text begun."""

    def complete(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
        async def ask() -> list[str]:
            async with asyncio.timeout(PATIENCE_S), await _connect(context) as bus:
                lists = [await source(bus, begun, context.params) for source in sources]
            names = {name for names in lists for name in names if name.startswith(begun)}
            return sorted(filter(str.isprintable, names))[:OFFERED_MAX]

        try:
            return command.run(ask())
        except Exception:  # noqa: BLE001  (a shell's prompt is no place for errors)
            return []

    return complete


def similar_to(context: click.Context, message: str) -> str | None:
    """A hint with names of the running domain that resemble the one that ``message`` does not find."""
    near: list[str] = []
    for param in context.command.params:
        value = context.params.get(param.name or "")
        for word in value if isinstance(value, tuple) else (value,):
            if not isinstance(word, str) or repr(word) not in message:
                continue
            context.params[param.name or ""] = None  # as before it was typed
            # Of many names only the first are offered: those that begin alike are requested as well.
            for begun in dict.fromkeys((word[:2], "")):
                offered = [item.value for item in param.shell_complete(context, begun) if item.value != word]
                near += difflib.get_close_matches(word, offered, n=SIMILAR_MAX)
    return f"did you mean {' or '.join(list(dict.fromkeys(near))[:SIMILAR_MAX])}?" if near else None


async def _connect(context: click.Context) -> api.Bus:
    given = {name: context.params.get(name) for name in ("creds", "ca", "locator")}
    to = connection.ConnectionOptions(tuple(context.params.get("servers") or ()), **given)
    return await connection.connect(command.invocation_of(context), to)


def _prefix(field: str, begun: str) -> str:
    """A predicate that selects the names that begin with ``begun``."""
    quoted = begun.replace("'", "''")
    for special in "\\%_":
        quoted = quoted.replace(special, f"\\{special}")
    return f"{field} LIKE '{quoted}%' ESCAPE '\\'" if begun else ""


async def _call(bus: api.Bus, subject: str, **arguments: Any) -> Any:
    from muster.bus.rpc import client

    return await client.call(bus, subject, arguments, timeout_s=PATIENCE_S, waits=False)


# -- resources ---------------------------------------------------------------------------------------------


async def _resources(bus: api.Bus, begun: str, _: dict[str, Any]) -> Iterable[str]:
    from muster.manage import protocol

    page = await _call(
        bus,
        protocol.read(bus.identity, "enumerate"),
        where=_prefix("name", begun),
        names_only=True,
        limit=OFFERED_MAX,
    )
    return list(page["items"])


def _rows(verb: str, field: str) -> Source:
    """A field of the rows that the registry lists."""

    async def names(bus: api.Bus, _: str, __: dict[str, Any]) -> Iterable[str]:
        from muster.manage import protocol

        page = await _call(bus, protocol.read(bus.identity, verb))
        return [row[field] for row in page["items"]]

    return names


async def _operations(bus: api.Bus, _: str, params: dict[str, Any]) -> Iterable[str]:
    """The operations of the resource named before, or of one resource of each type."""
    from muster.manage import protocol

    names = list(params.get("words") or params.get("names") or ())[:1]
    if not names:
        page = await _call(bus, protocol.read(bus.identity, "enumerate"), where="")
        names = list({row["type"]: row["name"] for row in page["items"]}.values())
    rows = await _call(
        bus,
        protocol.request(bus.identity, "exec"),
        operation=protocol.Verb.ENUMERATE.value,
        names=names,
        arguments={},
        timeout_s=PATIENCE_S,
        id=f"completion-{asyncio.get_running_loop().time()}",
    )
    return [operation for row in rows for operation in (row["result"] or {}).get("operations", ())]


async def _words(bus: api.Bus, begun: str, params: dict[str, Any]) -> Iterable[str]:
    """``exec [RESOURCE] OPERATION``."""
    source = _operations if params.get("words") or params.get("where") else _resources
    return await source(bus, begun, params)


async def _joined(bus: api.Bus, _: str, __: dict[str, Any]) -> Iterable[str]:
    from muster.core import subjects
    from muster.manage import protocol

    rows = await _call(bus, subjects.from_identity(protocol.PART, bus.identity, "domain", "machines"))
    return [row["name"] for row in rows]


async def _described(bus: api.Bus, begun: str, params: dict[str, Any]) -> Iterable[str]:
    """``describe [machine] NAME``."""
    if params.get("names"):
        return await _rows("agents", "name")(bus, begun, params)
    return ["machine", *await _resources(bus, begun, params)]


async def _processes(bus: api.Bus, _: str, __: dict[str, Any]) -> Iterable[str]:
    from muster.core import subjects
    from muster.manage import protocol

    rows = await _call(bus, subjects.from_identity(protocol.PART, bus.identity, "domain", "processes"))
    return [row["name"] for row in rows]


# -- the bus and its brokers -------------------------------------------------------------------------------


def _brokers(verb: str, field: str = "") -> Source:
    async def names(bus: api.Bus, _: str, __: dict[str, Any]) -> Iterable[str]:
        from muster.bus.brokers import control
        from muster.core import subjects

        rows = await _call(bus, subjects.from_identity(control.PART, bus.identity, control.KIND, verb))
        return [row[field] if field else row for row in rows]

    return names


# -- messages ----------------------------------------------------------------------------------------------


def _messages(request: str, prefix: str = "", field: str = "") -> Source:
    async def names(bus: api.Bus, _: str, __: dict[str, Any]) -> Iterable[str]:
        from muster.message import protocol
        from muster.message.client import api as message_api

        kind = getattr(protocol, request)
        async with message_api.Connection(bus) as connected:
            reply: Any = await connected.request(kind())
        rows = reply.queues if request == "ListQueues" else reply.subscriptions
        return [f"{prefix}{getattr(row, field)}" for row in rows]

    return names


async def _destination_kinds(_: api.Bus, begun: str, __: dict[str, Any]) -> Iterable[str]:
    return ["queue:", "topic:"] if ":" not in begun else []


async def _topics(bus: api.Bus, begun: str, params: dict[str, Any]) -> Iterable[str]:
    """Subscribed topics without wildcards: those that a message can be published on."""
    from muster.core import errors, topics

    names = []
    for pattern in await _brokers("topics")(bus, begun, params):
        with contextlib.suppress(errors.InvalidInput):
            names.append(str(topics.Topic.parse(pattern)))
    return names


async def _destination_topics(bus: api.Bus, begun: str, params: dict[str, Any]) -> Iterable[str]:
    return [f"topic:{topic}" for topic in await _topics(bus, begun, params)]


# -- contexts, notifications, monitoring -------------------------------------------------------------------


async def _contexts(bus: api.Bus, begun: str, _: dict[str, Any]) -> Iterable[str]:
    from muster.inform import client

    inform = client.InformClient(bus, timeout_s=PATIENCE_S)
    matches = await inform.find(_prefix("key", begun) or "key LIKE '%'", limit=OFFERED_MAX)
    return [context.key for context in matches.contexts]


async def _receivers(bus: api.Bus, _: str, __: dict[str, Any]) -> Iterable[str]:
    from muster.notify import queries

    page = await queries.list_receivers(bus, limit=OFFERED_MAX)
    return [receiver.receiver for receiver in page.receivers]


async def _models(bus: api.Bus, _: str, __: dict[str, Any]) -> Iterable[str]:
    from muster.notify import queries

    return [model.name for model in await queries.list_models(bus) if model.of == "receiver"]


def _monitored(kind: str) -> Source:
    async def names(bus: api.Bus, _: str, params: dict[str, Any]) -> Iterable[str]:
        from muster.pipeline import client

        pipeline = client.PipelineClient(bus)
        if kind == "machines":
            top = await pipeline.top()
            return {node.machine for nodes in (top.metrics if top else {}).values() for node in nodes}
        if kind == "groups":
            system = await pipeline.system()
            return [group.group for group in (system.groups if system else ())]
        if kind == "silences":
            return [silence.id for silence in await pipeline.silences()]
        alerts = await pipeline.alerts()
        if kind == "rules":
            return [alert.rule for alert in alerts]
        return [alert.about for alert in alerts if alert.rule == params.get("rule")]

    return names


def _keyring(names: Callable[[keyring.Keyring], Iterable[str]]) -> Completer:
    """Names in the keyring of the home, which need no running domain."""

    def complete(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
        try:
            from muster.app import identities
            from muster.client import location

            settings = location.shared_settings(command.invocation_of(context).home)
            return sorted(name for name in names(identities.open_keyring(settings)) if name.startswith(begun))
        except Exception:  # noqa: BLE001  (as above)
            return []

    return complete


RESOURCES = _completer(_resources)
RESOURCE_OPERATION = _completer(_words)
AGENTS = _completer(_rows("agents", "name"))
RESOURCE_OR_MACHINE = _completer(_described)
RESOURCES_AND_AGENTS = _completer(_resources, _rows("agents", "name"))
ROLLOUTS = _completer(_rows("rollouts", "id"))
JOBS = _completer(_rows("jobs", "name"))
SECRETS = _completer(_rows("secrets", "name"))
PROCESSES = _completer(_processes)
JOINED = _completer(_joined)
BROKERS = _completer(_brokers("list", "name"))
LINKS = _completer(_brokers("links", "id"))
TOPICS = _completer(_topics)
TOPIC_PATTERNS = _completer(_brokers("topics"))
QUEUES = _completer(_messages("ListQueues", field="queue"))
SUBSCRIPTIONS = _completer(_messages("ListSubscriptions", field="subscription"))
DESTINATIONS = _completer(_destination_kinds, _messages("ListQueues", "queue:", "queue"), _destination_topics)
CONTEXTS = _completer(_contexts)
RECEIVERS = _completer(_receivers)
MODELS = _completer(_models)
MACHINES = _completer(_monitored("machines"), _rows("agents", "name"))
GROUPS = _completer(_monitored("groups"))
RULES = _completer(_monitored("rules"))
ALERTED = _completer(_monitored("alerted"))
SILENCES = _completer(_monitored("silences"))
IDENTITIES = _keyring(lambda opened: [record.identity for record in opened.records()])
LOGINS = _keyring(lambda opened: opened.passwords().names())
