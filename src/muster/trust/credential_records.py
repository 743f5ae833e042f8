"""What is known of a credential: its record, its revocation, and the rights that its document names. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from muster.core import errors
from muster.trust import jwt
from muster.trust.permissions import queue_rights, roles

# Tags of a user's document.
_TOPIC = "topic:"
_QUEUE = "queue:"
SHELL = "shell"  # its holder may run commands inside resources
LOGIN = "login"  # made for a login: its key was not handed out, so its role follows that of the login


class CredentialRevocation(msgspec.Struct, frozen=True):
    identity: str
    at: int
    expires_at: int  # 0: never, so the revocation is stored permanently


def decode_revocations(data: bytes, source: str) -> dict[str, CredentialRevocation]:
    """By public key. ``source`` is for the error."""
    try:
        return msgspec.json.decode(data, type=dict[str, CredentialRevocation])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidInput(f"{source} is damaged: {error}", hint="restore it from a backup") from None


@dataclass(frozen=True, slots=True)
class CredentialRecord:
    """The properties of a credential. ``status`` is ``valid``, ``expired`` or ``revoked``."""

    identity: str
    domain: str
    role: str
    status: str
    public_key: str
    serial: str
    issued_at: int
    expires_at: int | None
    bearer: bool
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    queues: queue_rights.Grants
    of_login: bool = False
    may_run_commands: bool = False  # inside resources; for operators


def tags(topics: tuple[str, ...] | None, queues: queue_rights.Grants | None) -> tuple[str, ...]:
    """The tags of a document that names these topics and queues; None: those of its role."""
    if () in (topics, queues):  # a document that names none has those of its role
        raise errors.InvalidInput("name at least one topic or queue, or leave them all to the role")
    return (*(f"{_TOPIC}{topic}" for topic in topics or ()), *(f"{_QUEUE}{grant}" for grant in queues or ()))


def topics_in(user: jwt.UserClaims) -> tuple[str, ...]:
    """The topics that the document names."""
    return tuple(tag.removeprefix(_TOPIC) for tag in user.tags if tag.startswith(_TOPIC))


def queues_in(user: jwt.UserClaims) -> queue_rights.Grants | None:
    """The grants that the document itself names; None: it names none."""
    queues = [tag.removeprefix(_QUEUE) for tag in user.tags if tag.startswith(_QUEUE)]
    return tuple(map(queue_rights.QueueGrant.parse, queues)) or None


def queues_of(user: jwt.UserClaims, role: roles.Role | None) -> queue_rights.Grants:
    named = queues_in(user)
    if named is not None or role is None:
        return named or ()
    return queue_rights.of_role(role, narrowed=bool(topics_in(user)))
