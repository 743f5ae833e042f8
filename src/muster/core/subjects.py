"""The plan of Muster's own broker subjects, so that permissions follow from a name's position.

    muster.<part>.from.<identity>.<kind>[.…]   published only by that identity
    muster.<part>.to.<identity>.<kind>[.…]     received only by that identity
    muster.<part>.all.<kind>[.…]               published by a service to the complete domain
    muster.<part>.log.<kind>[.…]               stored by the processes of that part
    _R.<responder>.<requester>.<session>.<token>   the reply to one request
    _INBOX.<identity>.…                        messages of the broker to that identity

The broker enforces the first two (see `muster.trust`), so the identity of a sender cannot be forged: a
receiver reads it from the subject, never from the message. Topics of users (`muster.core.topics`) are below
``topic.``: permissions are allow lists, so freely chosen names need a first token of their own.

A request that changes nothing has the kind ``read`` (``muster.manage.from.ann.read.resources``): a viewer may
send only those.

Replies. The broker does not check the reply subject of a request, so the reply subject contains both ends,
and permissions protect both: the responder publishes only below its own ``_R.<responder>.``, the requester
subscribes only to ``_R.*.<itself>.>``. The subject of the request determines the responder (`responder`):
``@<part>`` for a request to a part (any process that serves it may reply; ``@`` cannot occur in an identity),
the identity for a request to one process, and `APP` for topics of users, whose responder is unknown: such
replies are not authenticated. A service replies only below `reply_prefix`, so it cannot be made to publish to
other subjects with its own permissions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from muster.core import errors

PREFIX = "muster"
INBOX_PREFIX = "_INBOX"
REPLY_PREFIX = "_R"
APP = "app"  # the responder in replies to requests on users' topics, so no identity has this name
TOPIC_PREFIX = "topic"  # the first token of every users' topic

# The broker publishes connection events here: `<CONNECTIONS>.connect` and `<CONNECTIONS>.disconnect`.
CONNECTIONS = "muster.bus.all.connections"

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")


@functools.lru_cache(maxsize=8192)
def token(name: str) -> str:
    """Return ``name`` if it is valid as one subject token; otherwise raise an error with the reason.

    Cached: each hybrid timestamp checks the name of its node.
    """
    if not _TOKEN.match(name):
        raise errors.InvalidInput(
            f"{name[:140]!r} cannot be a name: use 1 to 128 of A-Z a-z 0-9 _ -",
        )
    return name


def identity(name: str) -> str:
    """``name`` itself if an identity can have it."""
    if token(name) == APP:
        raise errors.InvalidInput(f"{APP!r} cannot be an identity: it is reserved for replies on topics")
    return name


def from_identity(part: str, identity: str, *kind: str) -> str:
    return ".".join((PREFIX, part, "from", identity, *kind))


def to_identity(part: str, identity: str, *kind: str) -> str:
    return ".".join((PREFIX, part, "to", identity, *kind))


def to_all(part: str, *kind: str) -> str:
    return ".".join((PREFIX, part, "all", *kind))


def log_subject(part: str, *kind: str) -> str:
    return ".".join((PREFIX, part, "log", *kind))


def inbox(identity: str) -> str:
    return f"{INBOX_PREFIX}.{identity}"


@functools.lru_cache(maxsize=4096)
def responder(subject: str) -> str:
    """The process or processes that reply to a request on ``subject``; empty where the broker does."""
    if subject.startswith("$"):
        return ""
    levels = subject.split(".", 4)
    if levels[0] != PREFIX or len(levels) < 4:
        return APP
    return levels[3] if levels[2] == "to" else f"@{levels[1]}"


def reply_subject(responder: str, requester: str, token: str) -> str:
    """The reply subject of ``responder`` (see `responder`); ``requester`` is an identity and its session."""
    if not responder:
        return f"{INBOX_PREFIX}.{requester}.{token}"
    return f"{REPLY_PREFIX}.{responder}.{requester}.{token}"


@functools.lru_cache(maxsize=4096)
def reply_prefix(subject: str) -> str:
    """The prefix of the reply subject of a request on ``subject``: on a ``from`` subject, the reply space of
    its sender; on others the requester is unknown."""
    prefix = f"{REPLY_PREFIX}.{responder(subject)}."
    levels = subject.split(".", 4)
    return f"{prefix}{levels[3]}." if len(levels) == 5 and levels[2] == "from" else prefix


def may_reply(subject: str, reply: str | None) -> bool:
    """Whether a service may reply to a request on ``subject`` that names ``reply``: it must be in the reply
    space of the requester. Otherwise the requester could publish with the permissions of the service."""
    return reply is not None and reply.startswith(reply_prefix(subject))


def sender_of(subject: str) -> str:
    """The identity that published on this ``from`` subject, which the broker enforces."""
    parts = subject.split(".", 4)
    if len(parts) < 5 or parts[0] != PREFIX or parts[2] != "from":
        raise errors.InvalidInput(
            f"{subject!r} does not carry its sender: expected muster.<part>.from.<identity>.…"
        )
    return parts[3]


def matches(pattern: str, subject: str) -> bool:
    """Match like the broker: ``*`` is one token, a last ``>`` is one or more.

    If ``subject`` has wildcards: whether every subject that it matches is matched.
    """
    pattern_tokens, tokens = pattern.split("."), subject.split(".")
    if pattern_tokens[-1] == ">":
        pattern_tokens.pop()
        if len(tokens) <= len(pattern_tokens):
            return False
        tokens = tokens[: len(pattern_tokens)]
    return len(pattern_tokens) == len(tokens) and all(
        w == g or (w == "*" and g != ">") for w, g in zip(pattern_tokens, tokens, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """A regular expression that matches the same subjects, for patterns that are compared very often."""
    tokens = pattern.split(".")
    levels = ["[^.]*" if token == "*" else re.escape(token) for token in tokens]
    if tokens[-1] == ">":
        levels[-1] = ".*"
    return re.compile(r"\.".join(levels) + r"\Z", re.DOTALL)


class SubjectPatternSet:
    """Whether any of several patterns matches; results for recent subjects are cached."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = tuple(patterns)
        self._known: dict[str, bool] = {}

    def __str__(self) -> str:
        return ", ".join(self._patterns)

    def match(self, subject: str) -> bool:
        known = self._known.get(subject)
        if known is None:
            if len(self._known) >= 4096:
                self._known.clear()
            known = self._known[subject] = any(matches(pattern, subject) for pattern in self._patterns)
        return known
