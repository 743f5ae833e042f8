"""The protocol between the dispatchers of a domain, which own different partitions.

    muster.message.from.<dispatcher>.dispatch.<p>   a `PeerRequest` to partition p; the reply as to clients
    muster.message.all.members                      `DispatcherMember`: which processes can own partitions

A message for a queue of another partition is first stored in the own log, together with the record that it
results from, and then transferred. The receiver recognizes repetitions by the number of the message.

Acknowledgements in a transaction are prepared by their partitions, decided by one record of the coordinator,
and then resolved. Every attempt to commit has its own name, so that no late request of another attempt has an
effect. An attempt that its coordinator does not know has failed.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from muster.bus import api
from muster.bus.rpc import client
from muster.core import errors, subjects
from muster.message import partitions, protocol

WORD: Final = "dispatch"
REQUEST_S: Final = 5.0
MEMBERS: Final = subjects.to_all(partitions.PART, "members")


def peer_subject(identity: str, partition: int) -> str:
    return subjects.from_identity(partitions.PART, identity, WORD, str(partition))


class TransferredMessage(msgspec.Struct, frozen=True, array_like=True):
    """``channel`` and ``number`` identify it; numbers increase in a channel. ``republish``: subscribers of
    its topic have not received it. ``due``: its delivery time has been awaited, or does not count.
    """

    channel: str
    number: int
    destination: str
    meta: str  # `messages.MessageMeta` in JSON
    data: bytes
    republish: bool = False
    due: bool = False


class _PeerRequest(msgspec.Struct, frozen=True, tag_field="request", omit_defaults=True):
    pass


class TransferMessages(_PeerRequest, frozen=True, tag="transfer"):
    """Store messages that another partition accepted. They are never refused, except for lack of room."""

    messages: list[TransferredMessage]


class PrepareAcks(_PeerRequest, frozen=True, tag="prepare"):
    """Reserve messages that a transaction of another partition acknowledges.
    `message.errors.TransactionRolledBack` if the connection does not hold all of them.
    """

    attempt: str
    coordinator: int
    connection: str
    identity: str
    acks: dict[str, list[int]]


class ResolveAcks(_PeerRequest, frozen=True, tag="resolve"):
    """Acknowledge or release what an attempt has prepared."""

    attempt: str
    commit: bool


class AskOutcome(_PeerRequest, frozen=True, tag="outcome"):
    """The reply's ``count`` is an `Outcome`."""

    attempt: str


class StoreBody(_PeerRequest, frozen=True, tag="store-body"):
    """A chunk of a large body, of a message that will be transferred; see `protocol.StoreChunk`."""

    body: str
    data: bytes


class CheckDestination(_PeerRequest, frozen=True, tag="check"):
    """See `protocol.CheckTemporary`."""

    destination: str


class Outcome(enum.IntEnum):
    UNDECIDED = 0
    COMMITTED = 1
    ABORTED = 2


class DispatcherMember(msgspec.Struct, frozen=True):
    """A process that can own partitions. ``leaving``: it ends.

    ``broker`` and ``connection``: identify its bus connection in the brokers' disconnect events.
    """

    name: str
    leaving: bool = False
    broker: str = ""
    connection: int = 0


PeerRequest = TransferMessages | PrepareAcks | ResolveAcks | AskOutcome | StoreBody | CheckDestination

encode: Final = protocol.encode
decode_member: Final = msgspec.msgpack.Decoder(DispatcherMember).decode
_requests: Final = msgspec.msgpack.Decoder(PeerRequest)


def decode_request(data: bytes) -> PeerRequest:
    try:
        request: PeerRequest = _requests.decode(data)
        return request
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidInput(f"not a request between dispatchers: {error}") from error


async def call(bus: api.Bus, partition: int, request: PeerRequest) -> protocol.DispatcherReply:
    """Raises the error of the reply, or `errors.Unavailable` if there is none."""
    subject = peer_subject(bus.identity, partition)
    response = await client.exchange_once(bus, subject, encode(request), timeout_s=REQUEST_S)
    return protocol.read_reply(response.data)
