"""The subjects that each role may publish and receive: a table, and the permissions that follow from it.

Every identity publishes only under its own name, receives messages addressed to it or to all, replies only as
itself and receives only the replies to its own requests (`muster.core.subjects`). No identity may publish to
an inbox, not even to its own: only the broker sends there. The names of a process's receivers or resources
are further tokens after its identity, so the same rule covers them. A role adds to that:

- ``serves`` a part: it receives all requests to that part and replies to them, may address any identity in
  it, publishes to all for it, writes its log and the audit log;
- ``streams`` and ``buckets``: it creates, writes, reads and prunes these, and no others;
- ``reads``: it reads these streams;
- ``gets``: it gets messages of these streams by their sequence, which is its only permission;
- ``leases``: it holds leases of these parts, and so receives connection events;
- ``receives`` a part: it receives the messages to that part;
- ``topics``: it publishes and receives messages of users, and replies to requests on topics.

Messages between the processes of a part (`OWN_WORDS`) may not be sent by any other identity, under no name.

Why only services may use the JetStream interface: the broker sends the reply to any reply subject that the
requester names, without checking that the requester may publish there. A client that can store a message and
then fetch it "to" a subject of another identity has forged a sender. For the same reason a service replies
only in the reply space of the requester (`muster.core.subjects.may_reply`), and no role has the broker's
``allow_responses``: it permits a publication to any reply subject that a message names.  The role ``reader``
may get messages of the streams of reports, and so have copies of them sent to any subject; it chooses no
content, and services and the pipeline recognise copies.

Pure. The identity is a token in the subjects; in the role templates of an account it is the placeholder of
the broker, so that a change of this table reaches every credential by one update of the account.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from muster.core import errors, subjects
from muster.trust import jwt

PLACEHOLDER = "{{name()}}"  # the broker puts the user's name here

LEASES = "leases"  # bucket; a lease's key starts with the part it belongs to

AUDIT = "decisions"  # the stream of the audit: every service adds to it, only an operator can remove from it

# The streams of a part, for code that searches for them.
STREAMS = {
    "manage": ("registry", AUDIT),
    "monitor": ("reports", "summaries"),
    "pipeline": ("alerts", AUDIT, "system"),
    "notify": ("events", "matches", "notifications", "receivers"),
    "inform": ("contexts",),
    "message": ("messages", *(f"messages-{partition}" for partition in range(1, 8))),
    "web": (AUDIT,),
    "audit": (AUDIT,),
}

# The records of a service. Other roles that serve the part neither write nor receive them.
LOGS = {("manage", "registry"): subjects.log_subject("manage", "registry", ">")}

# Sent to a part only by its own processes: another sender would be taken for one of them. As short as
# possible: they are in every document with its own permissions.
OWN_WORDS = {
    "manage": ("renew", "checkpoint", "vouch.>"),
    "monitor": ("batch.>", "summary.>"),
    "pipeline": ("alert.>", "report.>", "progress"),
    "message": ("dispatch.*",),
}

# The connections of the domain's account: who, from where, and their subscriptions.
_CONNECTED = "$SYS.REQ.ACCOUNT.PING.CONNZ"

# The events contain addresses and the document of the connection: only for lease holders.
_CONNECTIONS = (f"{subjects.CONNECTIONS}.>",)

_CLIENT = ("STANDARD", "WEBSOCKET")
_TAG = "role:"
_SUBJECT = re.compile(r"[^\s.]+(\.[^\s.]+)*\Z")


class Role(enum.StrEnum):
    AGENT = "agent"
    JOINING = "joining"
    MANAGER = "manager"
    REGISTRY = "registry"
    BOOTSTRAP = "bootstrap"
    NOTIFIER = "notifier"
    CHANNEL = "channel"
    PIPELINE = "pipeline"
    GATEWAY = "gateway"
    INFORMATION_NODE = "information-node"
    RESPONDER = "responder"
    AUTHORITY = "authority"
    USER = "user"
    OPERATOR = "operator"
    VIEWER = "viewer"
    READER = "reader"
    WEB = "web"
    LINK = "link"
    SYSTEM = "system"

    @classmethod
    def named(cls, name: str) -> Role:
        try:
            return cls(name)
        except ValueError:
            raise errors.InvalidInput(f"no role {name[:60]!r}: one of {', '.join(cls)}") from None


@dataclass(frozen=True, slots=True)
class RolePermissions:
    """The permissions of a role in addition to those of all. ``<identity>`` in a subject is the holder of the
    role."""

    why: str
    serves: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    gets: tuple[str, ...] = ()
    buckets: tuple[str, ...] = ()
    leases: tuple[str, ...] = ()
    receives: tuple[str, ...] = ()
    topics: bool = False
    publish_prefix: str = ""  # the first token of everything it publishes, if that is restricted
    asks_only: tuple[str, ...] = ()  # a part and one request to it, which is its only permission
    # parts whose internal messages it may send in addition to those it serves
    publishes_for: tuple[str, ...] = ()
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    connections: tuple[str, ...] = _CLIENT


DUTIES = {
    Role.AGENT: RolePermissions("hosts adapters and the sensor of one machine"),
    Role.JOINING: RolePermissions(
        "the holder of an enrolment token: requests admission", asks_only=("manage", "domain", "enrol")
    ),
    Role.MANAGER: RolePermissions(
        "manages resources through their adapters",
        publishes_for=("manage",),
        publish=(
            subjects.to_identity("manage", ">"),
            subjects.to_all("manage", ">"),
            f"{subjects.REPLY_PREFIX}.@manage.>",
        ),
        subscribe=tuple(
            subjects.from_identity("manage", "*", kind, "<identity>") for kind in ("beat", "event")
        ),
    ),
    Role.REGISTRY: RolePermissions(
        "stores the system state",
        serves=("manage",),
        streams=("registry",),
        reads=("alerts",),
        leases=("manage",),
    ),
    Role.BOOTSTRAP: RolePermissions(
        "starts the domain and its brokers, monitors budgets, stores and exports the audit log",
        serves=("manage", "bus", "audit"),
        reads=(AUDIT,),
        publish=(
            "$JS.API.STREAM.LIST",
            "$JS.API.STREAM.NAMES",
            "$JS.API.STREAM.INFO.*",
            "$JS.API.STREAM.UPDATE.*",
        ),
    ),
    Role.NOTIFIER: RolePermissions(
        "matches events with receivers",
        serves=("notify",),
        streams=STREAMS["notify"],
        buckets=("notify",),
        leases=("notify",),
    ),
    Role.CHANNEL: RolePermissions(
        "merges reports and passes them on",
        serves=("monitor",),
        streams=STREAMS["monitor"],
        buckets=("monitor",),
    ),
    Role.PIPELINE: RolePermissions(
        "rolls reports up and raises alerts",
        serves=("pipeline",),
        streams=("alerts", "system"),
        reads=STREAMS["monitor"],
        leases=("pipeline",),
        receives=("monitor",),
        publishes_for=("monitor",),  # its tick, among the reports
    ),
    Role.GATEWAY: RolePermissions(
        "carries messages (JMS), also for foreign protocols",
        serves=("message",),
        streams=STREAMS["message"],
        leases=("message",),
        topics=True,
    ),
    Role.INFORMATION_NODE: RolePermissions(
        "holds copies of contexts", serves=("inform",), streams=STREAMS["inform"]
    ),
    Role.RESPONDER: RolePermissions("turns alerts into notifications", reads=("alerts",)),
    Role.AUTHORITY: RolePermissions("grants restricted attributes"),
    Role.USER: RolePermissions("an application", topics=True),
    Role.OPERATOR: RolePermissions(
        "a person who runs the domain, and may do everything in it",
        topics=True,
        publishes_for=("monitor",),  # simulated fleets
        publish=("$JS.API.>", "$JS.ACK.>", "$JS.FC.>", "$JS.SNAPSHOT.>", "$KV.>", _CONNECTED),
        subscribe=("muster.>", "$JS.EVENT.>"),
    ),
    Role.VIEWER: RolePermissions("a person with read-only access", publish_prefix="read"),
    Role.READER: RolePermissions(
        "a program that reads the reports, such as a job of Spark", gets=STREAMS["monitor"]
    ),
    Role.WEB: RolePermissions(
        "shows the domain to people, and stores the audit log of their actions there",
        serves=("web",),
        reads=(*STREAMS["monitor"], "alerts", "system", AUDIT, "KV_monitor"),
        publish=("$JS.API.STREAM.CREATE.KV_monitor", "$JS.API.STREAM.UPDATE.KV_monitor", _CONNECTED),
        subscribe=(
            subjects.log_subject("*", "decision", ">"),
            subjects.from_identity("monitor", "*", "batch", "root", ">"),
            *(subjects.from_identity("pipeline", "*", word) for word in OWN_WORDS["pipeline"]),
        ),
    ),
    Role.LINK: RolePermissions(
        "a leaf link between two brokers", publish=(">",), subscribe=(">",), connections=("LEAFNODE",)
    ),
    Role.SYSTEM: RolePermissions(
        "publishes changed accounts to brokers, and changes which of them store",
        publish=("$SYS.REQ.>", "$JS.API.SERVER.>"),
        subscribe=("$SYS.>",),
    ),
}


def limits(
    role: Role,
    identity: str = PLACEHOLDER,
    *,
    topics: tuple[str, ...] | None = None,
    bearer: bool = False,
) -> jwt.UserLimits:
    """The broker's permissions of ``identity`` in ``role``.

    ``topics`` narrows the users' topics it may use (subjects; None: all that the role may).  ``bearer`` is
    for MQTT clients, which can send a password but not sign: the document itself is then the secret.
    """
    duty = DUTIES[role]
    own_topics = _topics(role, topics)
    prefix = (duty.publish_prefix,) if duty.publish_prefix else ()
    publish = [
        subjects.from_identity("*", identity, *prefix, ">"),
        _replies(identity),
        *own_topics,
        *duty.publish,
    ]
    if own_topics:
        publish.append(_replies(subjects.APP))
    subscribe = [subjects.to_identity("*", identity, ">"), subjects.to_all("*", ">")]
    subscribe += [_replies("*", identity), f"{subjects.inbox(identity)}.>", *own_topics, *duty.subscribe]
    for part in duty.serves:
        publish += [_replies(f"@{part}"), *_service(part)]
        subscribe += [subjects.from_identity(part, "*", ">"), subjects.log_subject(part, ">")]
    publish += _storage(duty)
    subscribe += [subjects.from_identity(part, "*", ">") for part in duty.receives]
    subscribe = [subject.replace("<identity>", identity) for subject in subscribe]
    if duty.asks_only:
        part, *request = duty.asks_only
        publish = [subjects.from_identity(part, identity, *request)]
    if duty.gets:
        publish = [request for stream in duty.gets for request in _getting(stream)]
    if duty.asks_only or duty.gets:
        subscribe = [_replies("*", identity), f"{subjects.inbox(identity)}.>"]
    if bearer:
        # where the broker delivers the messages that it stored for it
        subscribe += ["$MQTT.sub.>", "$MQTT.deliver.pubrel.>"]
    return jwt.UserLimits(
        pub=jwt.SubjectPermissions(
            allow=tuple(publish),
            deny=_not_its_words(role) + _not_its_logs(duty) + _no_contexts(role, narrowed=topics is not None),
        ),
        sub=jwt.SubjectPermissions(
            allow=tuple(subscribe),
            deny=_not_its_logs(duty) + (() if sees_connections(role) else _CONNECTIONS),
        ),
        subs=jwt.UNLIMITED,
        data=jwt.UNLIMITED,
        payload=jwt.UNLIMITED,
        bearer_token=bearer,
        allowed_connection_types=("MQTT",) if bearer else duty.connections,
    )


def filled_in(template: jwt.UserLimits, identity: str) -> jwt.UserLimits:
    """The permissions of ``identity``, as brokers read the template of a role."""

    def named(subjects_: jwt.SubjectPermissions) -> jwt.SubjectPermissions:
        allow, deny = (
            tuple(subject.replace(PLACEHOLDER, identity) for subject in patterns)
            for patterns in (subjects_.allow, subjects_.deny)
        )
        return jwt.SubjectPermissions(allow=allow, deny=deny)

    return msgspec.structs.replace(template, pub=named(template.pub), sub=named(template.sub))


def _replies(*levels: str) -> str:
    return ".".join((subjects.REPLY_PREFIX, *levels, ">"))


def _topics(role: Role, topics: tuple[str, ...] | None) -> tuple[str, ...]:
    if topics is None:
        return (f"{subjects.TOPIC_PREFIX}.>",) if DUTIES[role].topics else ()
    if not DUTIES[role].topics:
        raise errors.InvalidInput(f"the role {role} uses no topics, so they cannot be narrowed")
    for topic in topics:
        if not topic.startswith(f"{subjects.TOPIC_PREFIX}.") or not _SUBJECT.match(topic):
            raise errors.InvalidInput(
                f"{topic[:140]!r} is not a subject of users' topics: expected {subjects.TOPIC_PREFIX}.…"
            )
    return topics


def _service(part: str) -> list[str]:
    own_subjects = [
        subjects.to_identity(part, ">"),
        subjects.to_all(part, ">"),
        subjects.log_subject(part, ">"),
    ]
    audit = [f"$JS.API.STREAM.INFO.{AUDIT}", f"$JS.API.STREAM.CREATE.{AUDIT}"]
    return [*own_subjects, *audit]


def _storage(duty: RolePermissions) -> list[str]:
    requests = [api for stream in duty.reads for api in _reading(stream)]
    requests += [api for stream in duty.streams for api in _owning(stream)]
    for bucket in duty.buckets:
        requests += [f"$KV.{bucket}.>", *_reading(f"KV_{bucket}"), *_creating(f"KV_{bucket}")]
    if duty.leases:
        requests += [f"$KV.{LEASES}.{part}.>" for part in duty.leases]
        requests += [*_reading(f"KV_{LEASES}"), *_creating(f"KV_{LEASES}"), _CONNECTED]
    return requests


def _getting(stream: str) -> list[str]:
    verbs = ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")
    return [f"$JS.API.{verb}.{stream}" for verb in verbs]


def _reading(stream: str) -> list[str]:
    return [
        *_getting(stream),
        f"$JS.API.DIRECT.GET.{stream}.>",
        *(f"$JS.API.CONSUMER.{verb}.{stream}.>" for verb in ("CREATE", "DELETE")),
        *(f"$JS.FC.{where}{stream}.>" for where in ("", "*.*.")),
    ]


def _creating(stream: str) -> list[str]:
    return [f"$JS.API.STREAM.CREATE.{stream}", f"$JS.API.STREAM.UPDATE.{stream}"]


def _owning(stream: str) -> list[str]:
    """All but to delete the stream itself."""
    verbs = ("PURGE", "MSG.DELETE")
    return [*_reading(stream), *_creating(stream), *(f"$JS.API.STREAM.{verb}.{stream}" for verb in verbs)]


def _not_its_words(role: Role) -> tuple[str, ...]:
    duty = DUTIES[role]
    if role in (Role.LINK, Role.SYSTEM):  # forwards everything; publishes no Muster messages
        return ()
    return tuple(
        subjects.from_identity(part, "*", word)
        for part, words in OWN_WORDS.items()
        if part not in (*duty.serves, *duty.publishes_for)
        for word in words
    )


def _not_its_logs(duty: RolePermissions) -> tuple[str, ...]:
    return tuple(
        subject
        for (part, stream), subject in LOGS.items()
        if part in duty.serves and stream not in duty.streams
    )


def _no_contexts(role: Role, *, narrowed: bool) -> tuple[str, ...]:
    """Machines, and users who are limited to some topics, write no contexts: others rely on them."""
    is_denied = narrowed or role is Role.AGENT
    return (subjects.from_identity("inform", "*", "write", ">"),) if is_denied else ()


_NARROWEST_FIRST = (Role.VIEWER, Role.USER, Role.OPERATOR)


def of_login(identity: Role, login: Role) -> Role:
    """The role of a login: that of its identity, or `Role.VIEWER` if the login is limited to it.

    A login never widens. No other role narrows: services decide by the role of the identity, while the broker
    keeps a viewer from requests that change something.
    """
    if login is identity:
        return login
    if {identity, login} <= set(_NARROWEST_FIRST):
        narrower = min(identity, login, key=_NARROWEST_FIRST.index)
        if narrower in (identity, Role.VIEWER):
            return narrower
    raise errors.Conflict(
        f"an identity with the role {identity} has no logins with the role {login}",
        hint=f"give the login the role {identity}",
    )


def sees_connections(role: Role) -> bool:
    """Whether it receives connection events of the account, and may request its connections."""
    return bool(DUTIES[role].leases) or role in (Role.OPERATOR, Role.LINK)


def tag(role: Role) -> str:
    """The tag of a role in a user's document; its permissions are in the account."""
    return f"{_TAG}{role}"


def role_from_tags(tags: Sequence[str]) -> Role | None:
    """The role that a document names; None if it is not a Muster document."""
    name = next((text.removeprefix(_TAG) for text in tags if text.startswith(_TAG)), "")
    return Role(name) if name in set(Role) else None
