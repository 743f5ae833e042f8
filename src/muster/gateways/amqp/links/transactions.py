"""Transactions of a connection: sends and acknowledgements are held until the transaction is discharged."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from muster.core import errors
from muster.gateways.amqp.protocol import conditions, endpoints, frames
from muster.message import errors as message_errors
from muster.message import protocol, values
from muster.message.amqp_format import amqp_types

if TYPE_CHECKING:
    from muster.gateways.amqp import connection
    from muster.gateways.amqp.links import consumers, topics

_DECLARE, _DISCHARGE = (0x31, "amqp:declare:list"), (0x32, "amqp:discharge:list")
_LOCAL: Final = "amqp:local-transactions"
CAPABILITIES: Final = (_LOCAL, "amqp:multi-txns-per-ssn", "amqp:multi-ssns-per-txn")
_GLOBAL: Final = {"amqp:distributed-transactions", "amqp:promotable-transactions"}
_LOCAL_ONLY: Final = (
    "there are no distributed (XA) transactions; use a local transaction, and make the receiver idempotent"
)
_Live = tuple[Any, str, int]
OPEN_MAX: Final = 1000  # of a connection; their messages are limited by its budget


@dataclass(slots=True)
class AmqpTransaction:
    coordinator: endpoints.AmqpLink
    sends: list[protocol.SendMessage] = field(default_factory=list)
    acks: dict[str, list[int]] = field(default_factory=dict)
    refused: list[tuple[str, int, bytes]] = field(default_factory=list)  # outcome other than accepted
    defaults: dict[str, bytes] = field(default_factory=dict)  # of a rollback, by backlog; else failed
    # Topic messages, with their outcomes
    topic_deliveries: list[tuple[topics.TopicLink, int, bytes, bytes]] = field(default_factory=list)
    # Messages that the client has not settled (link, backlog, number): data, outcome, and how to settle them
    live: dict[_Live, tuple[bytes, bytes, Callable[[], None]]] = field(default_factory=dict)
    size: int = 0  # of the messages to send, in bytes
    held: int = 0  # of everything held in memory, in bytes
    error: errors.MusterError | None = None  # why it must be rolled back


class TransactionCoordinator:
    def __init__(self, owner: connection.AmqpConnection) -> None:
        self._connection = owner
        self._open: dict[bytes, AmqpTransaction] = {}

    def _named(self, state: bytes | None) -> tuple[bytes, AmqpTransaction]:
        try:
            name = frames.transaction_of(state)
        except amqp_types.MALFORMED as error:
            raise message_errors.FormatError(f"not a transactional state: {error}") from error
        transaction = self._open.get(name)
        if transaction is None:
            raise message_errors.UnknownTransaction("the transaction has ended, or never began")
        return name, transaction

    def send(self, state: bytes | None, send: protocol.SendMessage) -> bytes:
        """Add a message; returns the delivery state to reply with."""
        name, transaction = self._named(state)
        if len(transaction.sends) >= protocol.SENDS_MAX:
            raise errors.LimitExceeded(f"a transaction contains at most {protocol.SENDS_MAX} messages")
        size = len(send.data) + len(send.meta)
        if transaction.size + size > protocol.WORK_BYTES_MAX:
            raise errors.LimitExceeded(f"a transaction contains at most {protocol.WORK_BYTES_MAX} bytes")
        self._hold(transaction, size)
        transaction.sends.append(send)
        transaction.size += size
        return frames.transactional(name)

    def _hold(self, transaction: AmqpTransaction, size: int) -> None:
        if not self._connection.running.budget.add_to_transaction(size):
            raise errors.LimitExceeded("open transactions of this connection, or its login, are too large")
        transaction.held += size

    def _release(self, transaction: AmqpTransaction) -> None:
        self._connection.running.budget.end_transaction(transaction.held)
        transaction.held = 0

    def mark_failed(self, state: bytes | None, error: errors.MusterError) -> None:
        """A message of the transaction was rejected: its commit fails, because the client may not have waited
        for the outcome.
        """
        with contextlib.suppress(message_errors.FormatError, message_errors.UnknownTransaction):
            self._named(state)[1].error = error

    def _named_by(self, link: consumers.OutgoingLink, state: bytes | None) -> AmqpTransaction | None:
        """The transaction in which a message of ``link`` is settled. The link ends if there is none."""
        try:
            return self._named(state)[1]
        except (message_errors.FormatError, message_errors.UnknownTransaction) as error:
            self._connection.call_soon(functools.partial(self._end, link, error))
            return None

    def _end(self, link: consumers.OutgoingLink, error: errors.MusterError) -> None:
        if not link.closed:
            self._connection.link_factory.close_outgoing(link, conditions.name(error), error.message)

    def acknowledge(
        self, link: consumers.OutgoingLink, state: bytes | None, default: bytes | None, key: str, number: int
    ) -> bool:
        """``default``: the outcome if the state has none. False: the transaction has ended, so the message is
        delivered again.
        """
        transaction = self._named_by(link, state)
        if transaction is None:
            return False
        outcome = _outcome(state, default)
        if default is not None and not _is_failed(default):
            transaction.defaults[key] = default
        if frames.code_of(outcome) != frames.ACCEPTED:
            try:
                self._hold(transaction, len(outcome))
            except errors.LimitExceeded as error:
                transaction.error = error
                return False
            transaction.refused.append((key, number, outcome))
        else:
            transaction.acks.setdefault(key, []).append(number)
        return True

    def retire(self, token: endpoints.Token, state: bytes, settle: Callable[[], None]) -> None:
        """A message has an outcome in a transaction, and is not settled: the client keeps it if the
        transaction is rolled back.
        """
        link, key, number, data = token
        transaction = self._named_by(link, state)
        if transaction is None:
            return
        live = link, key, number
        if any(live in other.live for other in self._open.values() if other is not transaction):
            why = "a message has outcomes in two transactions"
            self._connection.close_link(transaction.coordinator, "amqp:transaction:rollback", why)
            self.abandon(transaction.coordinator)
            return
        try:
            self._hold(transaction, len(state))
        except errors.LimitExceeded as error:
            transaction.error = error
        else:
            transaction.live[live] = data, _outcome(state, None), settle

    def forget_live(self, link: consumers.OutgoingLink, key: str, number: int) -> None:
        """The client settles the message."""
        for transaction in self._open.values():
            transaction.live.pop((link, key, number), None)

    def hold(self, state: bytes | None, topic_link: topics.TopicLink, number: int, data: bytes) -> None:
        """A topic message has an outcome in a transaction. If that has ended, the message is delivered
        again.
        """
        transaction = self._named_by(topic_link, state)
        if transaction is None:
            topic_link.redeliver(number, data, counted=True)
            return
        try:
            self._hold(transaction, len(data))
        except errors.LimitExceeded as error:
            transaction.error = error
            topic_link.redeliver(number, data, counted=True)
        else:
            outcome = _outcome(state, topic_link.link.default_outcome)
            transaction.topic_deliveries.append((topic_link, number, data, outcome))

    def coordinate(self, link: endpoints.AmqpLink, number: int, data: bytes) -> None:
        """A message to the coordinator: declare or discharge."""
        command = _described(data)
        code = command.descriptor if command is not None else None
        if command is not None and code in _DECLARE:
            if command.value and _plain(command.value[0]) is not None:
                raise message_errors.NotSupported(f"a global transaction id: {_LOCAL_ONLY}")
            if len(self._open) >= OPEN_MAX:
                raise errors.LimitExceeded(f"a connection has at most {OPEN_MAX} open transactions")
            made = secrets.token_bytes(8)
            self._open[made] = AmqpTransaction(link)
            self._connection.running.settle(link, number, frames.declared(made))
        elif command is not None and code in _DISCHARGE:
            name, failed = (*map(_plain, command.value), None, None)[:2]
            if not isinstance(name, bytes):
                raise errors.InvalidInput("a discharge names no transaction")
            if any(_is_posting(made.link, name) for made in self._connection.producer_links.values()):
                why = "a message of the transaction is incomplete"
                self._connection.close_link(link, "amqp:transaction:rollback", why)
                self.abandon(link)
                return
            transaction = self._open.pop(name, None)
            if transaction is None:
                raise message_errors.UnknownTransaction("the transaction has ended, or never began")
            self._connection.spawn(self._discharge(link, number, transaction, commit=not failed))
        else:
            raise errors.InvalidInput("a coordinator accepts declare and discharge only")

    async def _discharge(
        self, link: endpoints.AmqpLink, number: int, transaction: AmqpTransaction, *, commit: bool
    ) -> None:
        try:
            await self._finish(link, number, transaction, commit=commit)
        finally:
            self._release(transaction)

    async def _finish(
        self, link: endpoints.AmqpLink, number: int, transaction: AmqpTransaction, *, commit: bool
    ) -> None:
        error = transaction.error if commit else None
        acks = {key: [*numbers] for key, numbers in transaction.acks.items()}
        for (_, key, place), (_, outcome, _) in transaction.live.items():
            if key and frames.code_of(outcome) == frames.ACCEPTED:
                acks.setdefault(key, []).append(place)
        if commit and error is None and (transaction.sends or acks):
            try:
                await self._connection.jms.submit(transaction.sends, acks, atomic=True)
            except errors.Unavailable as doubt:  # it may have been committed, or may still be
                self._connection.outcomes.discharged(acks)
                self._connection.fail(doubt)
                return
            except errors.MusterError as failure:
                error = failure
        if error is not None or not commit:
            await self._roll_back(transaction)
        else:
            self._connection.outcomes.discharged(acks)
            for key, place, outcome in transaction.refused:
                self._connection.outcomes.return_message(outcome, key, place)
            for topic_link, place, data, outcome in transaction.topic_deliveries:
                topic_link.returned(place, data, frames.code_of(outcome), outcome)
            self._connection.link_factory.end_settled()
        if error is not None:
            kind = (
                errors.MusterError if self._connection.is_qpid_jms else message_errors.TransactionRolledBack
            )
            self.refuse(link, number, False, kind(error.message))
        else:
            self._connection.running.settle(link, number, frames.ACCEPTED_STATE)
            if commit:
                self._settle_live(transaction)

    def _settle_live(self, transaction: AmqpTransaction) -> None:
        """Apply the outcomes of messages that the client has not settled. It may have settled one meanwhile,
        which is then in another transaction, or over.
        """
        for (holder, key, place), (data, outcome, settle) in transaction.live.items():
            code = frames.code_of(outcome)
            settle()
            if not key:
                holder.returned(place, data, code, outcome)
            elif code != frames.ACCEPTED:
                self._connection.outcomes.return_message(outcome, key, place)
        self._connection.link_factory.end_settled()

    def refuse(self, link: endpoints.AmqpLink, number: int, settled: bool, error: errors.MusterError) -> None:
        """Report an error to the client: by the outcome of its message, or else by the end of the link."""
        if link.can_reject and not settled:
            self._connection.reject(link, number, error)
        else:
            self._connection.close_link(link, conditions.name(error), conditions.description(error))
            self.abandon(link)

    def abandon(self, link: endpoints.AmqpLink) -> None:
        """A link was closed. If it was a coordinator, its open transactions are rolled back."""
        for name in [name for name, opened in self._open.items() if opened.coordinator is link]:
            transaction = self._open.pop(name)
            self._release(transaction)
            self._connection.spawn(self._roll_back(transaction))

    async def _roll_back(self, transaction: AmqpTransaction) -> None:
        jms = self._connection.jms
        back = transaction.acks
        for key, number, _ in transaction.refused:
            back.setdefault(key, []).append(number)
        self._connection.outcomes.discharged(back)
        for key, default in transaction.defaults.items():
            for number in back.pop(key, ()):
                self._connection.outcomes.apply(frames.code_of(default), default, key, number)
        self._connection.outcomes.acknowledge()
        if back:
            with contextlib.suppress(errors.Unavailable):
                await jms.request(protocol.ReleaseMessages(jms.name, back, counted=True))
        for topic_link, place, data, _ in transaction.topic_deliveries:
            if (default_outcome := topic_link.link.default_outcome) is not None:
                topic_link.returned(place, data, frames.code_of(default_outcome), default_outcome)
            else:
                topic_link.redeliver(place, data, counted=True)
        self._connection.link_factory.end_settled()


def check_capabilities(capabilities: frozenset[str]) -> None:
    """Refuse a coordinator for transactions of another kind than the gateway has."""
    if capabilities and _LOCAL not in capabilities and capabilities & _GLOBAL:
        raise message_errors.NotSupported(f"{', '.join(sorted(capabilities))}: {_LOCAL_ONLY}")


def _is_posting(link: endpoints.AmqpLink, name: bytes) -> bool:
    """Whether an incomplete message of the link belongs to this transaction."""
    state = link.partial[2] if link.partial is not None else None
    with contextlib.suppress(*amqp_types.MALFORMED):
        return frames.code_of(state) == frames.TRANSACTIONAL and frames.transaction_of(state) == name
    return False


def _is_failed(outcome: bytes) -> bool:
    """Whether it counts the delivery as failed, and nothing else: as every rollback does."""
    return frames.code_of(outcome) == frames.MODIFIED and frames.modified(outcome) == (True, False)


def _outcome(state: bytes | None, default: bytes | None) -> bytes:
    """The outcome of a message that is settled in a transaction."""
    return frames.outcome_of(state) or default or frames.RELEASED_STATE


def _plain(item: object) -> object:
    return item.value if isinstance(item, values.TypedValue) else item


def _described(data: bytes) -> amqp_types.DescribedValue | None:
    """The described list in the value section of a message, if there is one."""
    try:
        for code, _, value, _ in amqp_types.split(data):
            if code == amqp_types.VALUE:
                described, _ = amqp_types.read(data, value)
                if isinstance(described, amqp_types.DescribedValue) and isinstance(described.value, list):
                    return described
    except amqp_types.MALFORMED as error:
        raise message_errors.FormatError(f"not an AMQP message: {error}") from error
    return None
