"""The plan of Muster's own broker subjects, so that permissions follow from a name's position.

    muster.<part>.from.<identity>.<kind>[.…]   published by that identity and nobody else
    muster.<part>.to.<identity>.<kind>[.…]     received by that identity and nobody else
    muster.<part>.all.<kind>[.…]               said by a service to everyone in the domain
    muster.<part>.log.<kind>[.…]               kept by that part's own processes, whichever of them writes
    _INBOX.<identity>.…                        private answers to that identity

The broker enforces the first two (see `muster.trust`), which is what makes a sender's identity
unforgeable: a receiver reads it from the subject, never from the message.  Users' topics
(`muster.core.topics`) live under ``topic.``: permissions are lists of what is allowed, so what users name
freely needs a first token of its own.

A request that changes nothing has ``read`` as its kind (``muster.manage.from.ann.read.resources``): that is
all a viewer may say.
"""

from __future__ import annotations

import re

from muster.core import errors

PREFIX = "muster"
INBOX_PREFIX = "_INBOX"
TOPIC_PREFIX = "topic"  # the first token of every users' topic

# The broker says here who connected and who is gone: `<CONNECTIONS>.connect` and `<CONNECTIONS>.disconnect`.
CONNECTIONS = "muster.bus.all.connections"

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")


def token(name: str) -> str:
    """``name`` itself if it can stand as one subject token of ours; otherwise an error that says why."""
    if not _TOKEN.match(name):
        raise errors.InvalidInput(
            f"{name[:140]!r} cannot be a name: use 1 to 128 of A-Z a-z 0-9 _ -",
        )
    return name


def said_by(part: str, identity: str, *kind: str) -> str:
    return ".".join((PREFIX, part, "from", identity, *kind))


def addressed_to(part: str, identity: str, *kind: str) -> str:
    return ".".join((PREFIX, part, "to", identity, *kind))


def announced(part: str, *kind: str) -> str:
    return ".".join((PREFIX, part, "all", *kind))


def logged(part: str, *kind: str) -> str:
    return ".".join((PREFIX, part, "log", *kind))


def inbox(identity: str) -> str:
    return f"{INBOX_PREFIX}.{identity}"


def sender_of(subject: str) -> str:
    """The identity that the broker let publish on this ``from`` subject."""
    parts = subject.split(".", 4)
    if len(parts) < 5 or parts[0] != PREFIX or parts[2] != "from":
        raise errors.InvalidInput(
            f"{subject!r} does not carry its sender: expected muster.<part>.from.<identity>.…"
        )
    return parts[3]


def matches(pattern: str, subject: str) -> bool:
    """As the broker matches: ``*`` stands for one token, a last ``>`` for one or more."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(given) <= len(wanted):
            return False
        given = given[: len(wanted)]
    return len(wanted) == len(given) and all(w in ("*", g) for w, g in zip(wanted, given, strict=True))
