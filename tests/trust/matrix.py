"""The permission matrix: what an identity of each role may do on the bus, and its reference page.

`ATTEMPTS` lists one attempt for each class of subjects and operation, made by the identity ``me``. The result
follows from `roles.limits`; `test_permission_matrix.py` has the expected results written by hand, and makes
every attempt at a real broker. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from muster.trust.permissions import roles

ME = "me"
APART = (roles.Role.LINK, roles.Role.SYSTEM)  # no clients of the domain's account


class PermissionAttempt(NamedTuple):
    name: str
    subject: str
    receives: bool = False  # subscribe, rather than publish


ATTEMPTS = (
    PermissionAttempt("request admission as an agent", "muster.manage.from.me.domain.enrol"),
    PermissionAttempt("send requests that change something", "muster.manage.from.me.request.apply"),
    PermissionAttempt("send requests that read", "muster.manage.from.me.read.get"),
    PermissionAttempt("send under another identity", "muster.manage.from.other.request.apply"),
    PermissionAttempt("renew as a manager", "muster.manage.from.me.renew"),
    PermissionAttempt("send batches of reports", "muster.monitor.from.me.batch.root.0"),
    PermissionAttempt("raise alerts", "muster.pipeline.from.me.alert.hot"),
    PermissionAttempt("command agents", "muster.manage.to.other.command"),
    PermissionAttempt("notify receivers", "muster.notify.to.other.event"),
    PermissionAttempt("announce for manage", "muster.manage.all.state.r"),
    PermissionAttempt("announce connections", "muster.bus.all.connections.disconnect"),
    PermissionAttempt("write manage's log and audit", "muster.manage.log.decision.apply"),
    PermissionAttempt("write the registry's records", "muster.manage.log.registry.page"),
    PermissionAttempt("write web's log and audit", "muster.web.log.decision.apply"),
    PermissionAttempt("publish on users' topics", "topic.orders"),
    PermissionAttempt("reply as itself", "_R.me.other.s.1"),
    PermissionAttempt("reply as another identity", "_R.other.me.s.1"),
    PermissionAttempt("reply for manage", "_R.@manage.other.s.1"),
    PermissionAttempt("reply for bus and audit", "_R.@audit.other.s.1"),
    PermissionAttempt("reply for inform", "_R.@inform.other.s.1"),
    PermissionAttempt("reply for message", "_R.@message.other.s.1"),
    PermissionAttempt("reply for notify", "_R.@notify.other.s.1"),
    PermissionAttempt("reply for pipeline", "_R.@pipeline.other.s.1"),
    PermissionAttempt("reply on users' topics", "_R.app.other.s.1"),
    PermissionAttempt("publish to its own inbox", "_INBOX.me.1"),
    PermissionAttempt("publish to another's inbox", "_INBOX.other.1"),
    PermissionAttempt("list streams", "$JS.API.STREAM.NAMES"),
    PermissionAttempt("create its own stream", "$JS.API.STREAM.CREATE.mine"),
    PermissionAttempt("create the audit where it is missing", "$JS.API.STREAM.CREATE.decisions"),
    PermissionAttempt("change the audit's limits", "$JS.API.STREAM.UPDATE.decisions"),
    PermissionAttempt("read the audit", "$JS.API.STREAM.MSG.GET.decisions"),
    PermissionAttempt("purge the audit", "$JS.API.STREAM.PURGE.decisions"),
    PermissionAttempt("delete a stream", "$JS.API.STREAM.DELETE.reports"),
    PermissionAttempt("read the registry's records", "$JS.API.DIRECT.GET.registry"),
    PermissionAttempt("read reports", "$JS.API.DIRECT.GET.reports"),
    PermissionAttempt("consume alerts", "$JS.API.CONSUMER.CREATE.alerts.c"),
    PermissionAttempt("fetch contexts", "$JS.API.CONSUMER.MSG.NEXT.contexts.c"),
    PermissionAttempt("prune messages", "$JS.API.STREAM.MSG.DELETE.messages"),
    PermissionAttempt("acknowledge events", "$JS.ACK.events.c.1.1.1.1.0"),
    PermissionAttempt("write manage's leases", "$KV.leases.manage.x"),
    PermissionAttempt("write message's leases", "$KV.leases.message.x"),
    PermissionAttempt("write notify's leases", "$KV.leases.notify.x"),
    PermissionAttempt("write pipeline's leases", "$KV.leases.pipeline.x"),
    PermissionAttempt("write notify's bucket", "$KV.notify.x"),
    PermissionAttempt("write monitor's bucket", "$KV.monitor.x"),
    PermissionAttempt("request the list of connections", "$SYS.REQ.ACCOUNT.PING.CONNZ"),
    PermissionAttempt("ask brokers", "$SYS.REQ.SERVER.PING"),
    PermissionAttempt("change accounts", "$SYS.REQ.CLAIMS.UPDATE"),
    PermissionAttempt("receive messages addressed to it", "muster.manage.to.me.>", True),
    PermissionAttempt("receive messages addressed to another", "muster.manage.to.other.>", True),
    PermissionAttempt("receive messages addressed to any identity", "muster.*.to.*.>", True),
    PermissionAttempt("receive announcements", "muster.*.all.>", True),
    PermissionAttempt("receive connection events", "muster.bus.all.connections.>", True),
    PermissionAttempt("receive requests to manage", "muster.manage.from.*.request.*", True),
    PermissionAttempt("receive heartbeats sent to it", "muster.manage.from.*.beat.me", True),
    PermissionAttempt("receive requests to message", "muster.message.from.*.>", True),
    PermissionAttempt("receive reports", "muster.monitor.from.*.report.>", True),
    PermissionAttempt("receive alerts", "muster.pipeline.from.*.alert.>", True),
    PermissionAttempt("receive the audit", "muster.*.log.decision.>", True),
    PermissionAttempt("receive the registry's records", "muster.manage.log.registry.>", True),
    PermissionAttempt("receive on users' topics", "topic.>", True),
    PermissionAttempt("receive replies to it", "_R.*.me.>", True),
    PermissionAttempt("receive replies to another", "_R.*.other.>", True),
    PermissionAttempt("receive all replies", "_R.>", True),
    PermissionAttempt("receive in its own inbox", "_INBOX.me.>", True),
    PermissionAttempt("receive in another's inbox", "_INBOX.other.>", True),
    PermissionAttempt("receive storage requests", "$JS.API.>", True),
    PermissionAttempt("receive key/value changes", "$KV.>", True),
    PermissionAttempt("receive the brokers' events", "$SYS.>", True),
    PermissionAttempt("receive everything", ">", True),
)


class Way(NamedTuple):
    """An indirect way: an action of the broker for a client, and its effect."""

    name: str
    result: str
    test: str  # in tests/trust/test_indirect_ways.py, or next to the matrix


_REFUSED = "refused: no role below service level may send requests to JetStream"
_NO_DEPUTY = "test_a_role_below_service_level_has_no_deputy"
_IGNORED = "test_a_service_takes_nothing_that_jetstream_sends_for_a_request"

INDIRECT = (
    Way(
        "a reply subject that the sender chose",
        "gives no permission; services reply only in the sender's reply space",
        "test_no_reply_subject_and_no_header_gives_a_permission",
    ),
    Way("publish acknowledgement to a chosen subject", "arrives, and services ignore it", _IGNORED),
    Way("`DIRECT.GET` and `MSG.GET` with a chosen reply subject", _REFUSED, _NO_DEPUTY),
    Way("the same with a service's or operator's credentials", "arrives, and services ignore it", _IGNORED),
    Way(
        "the same with the role `reader`, which may get messages of `reports` and `summaries`",
        "refused by each process as a reply of the broker; the pipeline counts the copies in its stream",
        "test_a_reader_has_only_copies_of_reports_sent",
    ),
    Way(
        "the same, to a subject of another stream",
        "**possible**: the stream stores it. Logs skip it; a lease ends, and is acquired again; a context "
        "cannot be written and loses versions",
        "test_a_reader_can_have_a_copy_stored_in_any_stream",
    ),
    Way("push consumer (`deliver_subject`)", _REFUSED, _NO_DEPUTY),
    Way("the same with an operator's credentials", "arrives, and services ignore it", _IGNORED),
    Way("`MSG.NEXT` with a chosen reply subject", _REFUSED, _NO_DEPUTY),
    Way("the same with an operator's credentials", "arrives, and services ignore it", _IGNORED),
    Way("stream that republishes", _REFUSED, _NO_DEPUTY),
    Way("the same with an operator's credentials", "arrives, and services ignore it", _IGNORED),
    Way("mirror or source of a foreign stream", _REFUSED, _NO_DEPUTY),
    Way(
        "the same with a service's credentials",
        "**possible**: it reads the foreign stream through its own",
        "test_a_service_can_copy_a_foreign_stream_into_its_own",
    ),
    Way(
        "`Nats-Expected-…` and `Nats-Rollup` headers",
        "suppress the sender's own message; nothing stored is deleted",
        "test_headers_of_a_user_change_nothing_in_a_stream_but_its_own_message",
    ),
    Way(
        "service imports and exports, another domain's subjects",
        "domains export nothing, and import only the events of their own connections",
        "test_a_domain_exports_nothing_and_imports_only_its_own_connections",
    ),
    Way("WebSocket", "the same permissions", "test_a_websocket_client_has_the_same_permissions"),
    Way(
        "MQTT, its wills and retained messages",
        "the same permissions",
        "test_an_mqtt_client_has_the_same_permissions",
    ),
    Way(
        "MQTT with credentials of another kind",
        "refused",
        "test_an_mqtt_listener_takes_only_bearer_documents",
    ),
    Way("leaf-node listener with a client's credentials", "refused", "test_a_leaf_listener_takes_only_links"),
)


def indirect() -> str:
    """In Markdown: what each indirect way gives."""
    lines = ["| indirect way | result |", "|---|---|"]
    return "\n".join([*lines, *(f"| {way.name} | {way.result} |" for way in INDIRECT)])


def clients() -> list[roles.Role]:
    return [role for role in roles.Role if role not in APART]


def is_allowed(role: roles.Role, attempt: PermissionAttempt) -> bool:
    """Decide like the broker: an allowed pattern covers all of it, and no denied one covers all of it."""
    limits = roles.limits(role, ME)
    rules = limits.sub if attempt.receives else limits.pub
    return any(_covers(pattern, attempt.subject) for pattern in rules.allow) and not any(
        _covers(pattern, attempt.subject) for pattern in rules.deny
    )


def _covers(pattern: str, subject: str) -> bool:
    """Whether ``pattern`` matches every subject of ``subject``, which may have wildcards."""
    mine, tokens = pattern.split("."), subject.split(".")
    for place, token in enumerate(mine):
        if token == ">":
            return len(tokens) > place
        if place >= len(tokens) or tokens[place] == ">" or token not in ("*", tokens[place]):
            return False
    return len(mine) == len(tokens)


def table() -> str:
    """In Markdown: one line for each attempt, with the roles that may."""
    everyone = clients()
    lines = ["| an identity may | roles |", "|---|---|"]
    for attempt in ATTEMPTS:
        able = [role for role in everyone if is_allowed(role, attempt)]
        missing = [role for role in everyone if role not in able]
        if not missing:
            who = "all"
        elif not able:
            who = "none"
        elif len(missing) <= 2:
            who = f"all but {', '.join(missing)}"
        else:
            who = ", ".join(able)
        lines.append(f"| {attempt.name} (`{attempt.subject}`) | {who} |")
    return "\n".join(lines)


def duties() -> str:
    """In Markdown: what each role is for, and which parts, streams and buckets are its own."""
    lines = ["| role | purpose | serves | own streams and buckets | reads |", "|---|---|---|---|---|"]
    for role in clients():
        duty = roles.DUTIES[role]
        kept = [*duty.streams, *(f"{bucket} (bucket)" for bucket in duty.buckets)]
        cells = (
            role.value,
            duty.why,
            ", ".join(duty.serves),
            ", ".join(kept),
            ", ".join(duty.reads + duty.gets),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
