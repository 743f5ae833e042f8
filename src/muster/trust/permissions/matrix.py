"""The permission matrix: what an identity of each role may do on the bus, and the page that shows it.

`ATTEMPTS` lists one attempt for each class of subjects and verb, made by the identity ``me``.  What is
allowed follows from `roles.limits`; `tests/trust/test_permission_matrix.py` has the expected answers written
by hand, and makes every attempt at a real broker.  Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from muster.trust.permissions import roles

ME, OTHER = "me", "other"
APART = (roles.Role.LINK, roles.Role.SYSTEM)  # no clients of the domain's account


class Attempt(NamedTuple):
    name: str
    subject: str
    receives: bool = False  # subscribe, rather than publish


ATTEMPTS = (
    Attempt("ask to be admitted as an agent", "muster.manage.from.me.domain.enrol"),
    Attempt("send requests that change something", "muster.manage.from.me.request.apply"),
    Attempt("send requests that read", "muster.manage.from.me.read.get"),
    Attempt("send under another identity", "muster.manage.from.other.request.apply"),
    Attempt("renew as a manager", "muster.manage.from.me.renew"),
    Attempt("send batches of reports", "muster.monitor.from.me.batch.root.0"),
    Attempt("raise alerts", "muster.pipeline.from.me.alert.hot"),
    Attempt("command agents", "muster.manage.to.other.command"),
    Attempt("notify parties", "muster.notify.to.other.event"),
    Attempt("announce for manage", "muster.manage.all.state.r"),
    Attempt("announce connections", "muster.bus.all.connections.disconnect"),
    Attempt("write manage's log and audit", "muster.manage.log.decision.apply"),
    Attempt("write web's log and audit", "muster.web.log.decision.apply"),
    Attempt("publish on users' topics", "topic.orders"),
    Attempt("reply as itself", "_R.me.other.s.1"),
    Attempt("reply as another identity", "_R.other.me.s.1"),
    Attempt("reply for manage", "_R.@manage.other.s.1"),
    Attempt("reply for bus and audit", "_R.@audit.other.s.1"),
    Attempt("reply for inform", "_R.@inform.other.s.1"),
    Attempt("reply for message", "_R.@message.other.s.1"),
    Attempt("reply for notify", "_R.@notify.other.s.1"),
    Attempt("reply for pipeline", "_R.@pipeline.other.s.1"),
    Attempt("reply on users' topics", "_R.app.other.s.1"),
    Attempt("publish to its own inbox", "_INBOX.me.1"),
    Attempt("publish to another's inbox", "_INBOX.other.1"),
    Attempt("list streams", "$JS.API.STREAM.NAMES"),
    Attempt("create a stream of its own", "$JS.API.STREAM.CREATE.mine"),
    Attempt("create the audit where it is missing", "$JS.API.STREAM.CREATE.decisions"),
    Attempt("change the audit's limits", "$JS.API.STREAM.UPDATE.decisions"),
    Attempt("read the audit", "$JS.API.STREAM.MSG.GET.decisions"),
    Attempt("purge the audit", "$JS.API.STREAM.PURGE.decisions"),
    Attempt("delete a stream", "$JS.API.STREAM.DELETE.reports"),
    Attempt("read reports", "$JS.API.DIRECT.GET.reports"),
    Attempt("consume alerts", "$JS.API.CONSUMER.CREATE.alerts.c"),
    Attempt("fetch contexts", "$JS.API.CONSUMER.MSG.NEXT.contexts.c"),
    Attempt("prune messages", "$JS.API.STREAM.MSG.DELETE.messages"),
    Attempt("acknowledge events", "$JS.ACK.events.c.1.1.1.1.0"),
    Attempt("write manage's leases", "$KV.leases.manage.x"),
    Attempt("write message's leases", "$KV.leases.message.x"),
    Attempt("write notify's leases", "$KV.leases.notify.x"),
    Attempt("write notify's bucket", "$KV.notify.x"),
    Attempt("write monitor's bucket", "$KV.monitor.x"),
    Attempt("ask who is connected", "$SYS.REQ.ACCOUNT.PING.CONNZ"),
    Attempt("ask brokers", "$SYS.REQ.SERVER.PING"),
    Attempt("change accounts", "$SYS.REQ.CLAIMS.UPDATE"),
    Attempt("receive what is addressed to it", "muster.manage.to.me.>", True),
    Attempt("receive what is addressed to another", "muster.manage.to.other.>", True),
    Attempt("receive what is addressed to anyone", "muster.*.to.*.>", True),
    Attempt("receive announcements", "muster.*.all.>", True),
    Attempt("receive connection events", "muster.bus.all.connections.>", True),
    Attempt("receive requests to manage", "muster.manage.from.*.request.*", True),
    Attempt("receive heartbeats sent to it", "muster.manage.from.*.beat.me", True),
    Attempt("receive requests to message", "muster.message.from.*.>", True),
    Attempt("receive reports", "muster.monitor.from.*.report.>", True),
    Attempt("receive alerts", "muster.pipeline.from.*.alert.>", True),
    Attempt("receive the audit", "muster.*.log.decision.>", True),
    Attempt("receive on users' topics", "topic.>", True),
    Attempt("receive replies to it", "_R.*.me.>", True),
    Attempt("receive replies to another", "_R.*.other.>", True),
    Attempt("receive all replies", "_R.>", True),
    Attempt("receive in its own inbox", "_INBOX.me.>", True),
    Attempt("receive in another's inbox", "_INBOX.other.>", True),
    Attempt("receive storage requests", "$JS.API.>", True),
    Attempt("receive key/value changes", "$KV.>", True),
    Attempt("receive the brokers' events", "$SYS.>", True),
    Attempt("receive everything", ">", True),
)


class Way(NamedTuple):
    """An indirect way: what the broker does for a client, and what that gives it."""

    name: str
    result: str
    test: str  # in tests/trust/test_indirect_ways.py, or beside the matrix


_REFUSED = "refused: no role below service level may ask JetStream for anything"
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
        "keep out the sender's own message; nothing stored is deleted",
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


def is_allowed(role: roles.Role, attempt: Attempt) -> bool:
    """As the broker decides: an allowed pattern covers all of it, and no denied one covers it whole."""
    limits = roles.limits(role, ME)
    rules = limits.sub if attempt.receives else limits.pub
    return any(_covers(one, attempt.subject) for one in rules.allow) and not any(
        _covers(one, attempt.subject) for one in rules.deny
    )


def _covers(pattern: str, subject: str) -> bool:
    """Whether every subject of ``subject``, which may have wildcards, is one of ``pattern``."""
    mine, given = pattern.split("."), subject.split(".")
    for place, token in enumerate(mine):
        if token == ">":
            return len(given) > place
        if place >= len(given) or given[place] == ">" or token not in ("*", given[place]):
            return False
    return len(mine) == len(given)


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
        kept = [*duty.streams, *(f"{one} (bucket)" for one in duty.buckets)]
        cells = (role.value, duty.why, ", ".join(duty.serves), ", ".join(kept), ", ".join(duty.reads))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
