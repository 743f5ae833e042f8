"""Works: what a connection sends and acknowledges at one time, stored by one record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from muster.bus import api
from muster.core import errors
from muster.core import messages as core_messages
from muster.message import (
    destinations,
    messages,
    moved_messages,
    partitions,
    protocol,
    settings,
)
from muster.message import errors as message_errors
from muster.message.dispatcher import clients, delivery, rights
from muster.message.dispatcher import lifetime as lifetime_
from muster.message.dispatcher.log import journal, ledger, message_log
from muster.message.dispatcher.peers import peer_protocol, transactions

#: Acknowledged sequences by backlog, with the connection that received the messages.
Acks = list[tuple[clients.ClientConnection, dict[str, list[int]]]]


@dataclass(slots=True)
class _Target:
    """A destination, its subject in the log if it is a queue of this partition, and its expiry."""

    destination: destinations.Destination
    subject: str | None = None
    expiry_ms: int = 0


class Works:
    """``is_gone``: whether a connection is gone for good."""

    def __init__(
        self,
        bus: api.Bus,
        log: message_log.MessageLog,
        lifetime: lifetime_.DispatcherLifetime,
        client_table: clients.ClientTable,
        message_rights: rights.MessageRights,
        message_settings: settings.MessageSettings,
        delivery_queue: delivery.DeliveryQueue,
        is_gone: Callable[[str], bool],
    ) -> None:
        self._bus = bus
        self._log = log
        self._ledger = log.ledger
        self._lifetime = lifetime
        self._clients = client_table
        self._rights = message_rights
        self._settings = message_settings
        self._delivery = delivery_queue
        self._is_gone = is_gone
        self._committing: dict[tuple[str, int], list[lifetime_.ReplyCallback]] = {}
        self.transactions = transactions.Transactions(
            bus, log, lifetime, client_table, delivery_queue, self._all_acknowledged
        )

    def stage(self, connection: clients.ClientConnection, stage: protocol.StageMessages) -> None:
        staged = connection.staged
        if staged is None or staged.work != stage.work:
            staged = connection.staged = clients.StagedWork(stage.work)
        if len(staged.sends) >= stage.after + len(stage.sends):
            return  # a repeated request
        if len(staged.sends) != stage.after:
            raise errors.Conflict(f"{len(staged.sends)} messages are staged, not {stage.after}: start again")
        size = sum(len(send.data) + len(send.meta) for send in stage.sends)
        total = own = 0
        for other in self._clients.connections.values():
            if other.staged is not None:
                total += other.staged.bytes
                own += other.staged.bytes if other.identity == connection.identity else 0
        if staged.bytes + size > protocol.WORK_BYTES_MAX:
            raise errors.LimitExceeded(f"a transaction contains at most {protocol.WORK_BYTES_MAX} bytes")
        # Open transactions of one identity must not use the room of all others.
        if total + size > journal.QUEUED_BYTES_MAX or own + size > journal.QUEUED_BYTES_MAX // 2:
            raise errors.Overloaded("too many messages wait to be stored", retry_after_s=0.1)
        staged.sends += stage.sends
        staged.bytes += size

    def share(
        self,
        connection: clients.ClientConnection,
        shared: protocol.SharedWork,
        reply: lifetime_.ReplyCallback,
    ) -> None:
        """Commit a work of several connections. Some may not be registered yet, after a new dispatcher has
        started: their clients acknowledge again when they are.
        """
        if self._is_repeated(connection, shared.number, reply):
            return
        acks: Acks = []
        for name, by_backlog in shared.acks.items():
            holder = self._clients.connections.get(name)
            if holder is None or holder.identity != connection.identity:
                raise errors.Conflict(f"the connection {name!r} is not registered")
            holder.last_seen = self._lifetime.loop.time()
            acks.append((holder, by_backlog))
        work = protocol.CommitWork(connection.name, shared.number, shared.sends)
        self._commit(connection, work, acks, reply)

    def commit(
        self, connection: clients.ClientConnection, work: protocol.CommitWork, reply: lifetime_.ReplyCallback
    ) -> None:
        if not self._is_repeated(connection, work.number, reply):
            self._commit(connection, work, [(connection, work.acks)], reply)

    def _is_repeated(
        self, connection: clients.ClientConnection, number: int, reply: lifetime_.ReplyCallback
    ) -> bool:
        """Reply to a repetition when the work is stored."""
        key = (connection.name, number)
        if number <= self._ledger.last_works.get(connection.name, 0):
            self._reply_when_done(reply, self._delivery.transfers.last_waiting(), list(self._ledger.decided))
            return True
        if key in self._committing:
            self._committing[key].append(reply)
            return True
        return False

    def _commit(
        self,
        connection: clients.ClientConnection,
        work: protocol.CommitWork,
        acks: Acks,
        reply: lifetime_.ReplyCallback,
    ) -> None:
        key = (connection.name, work.number)
        sends = self._sends(connection, work)
        remote: dict[int, dict[str, list[int]]] = {}
        for _, by_backlog in acks:
            remote |= self.transactions.remote_acks(by_backlog)
        if remote and not work.strict:
            raise errors.InvalidInput("only a transaction acknowledges messages of several partitions")
        checked = self._temporary_elsewhere(sends)
        callbacks = self._committing[key] = [reply]

        def finish(result: protocol.DispatcherReply) -> None:
            self._committing.pop(key, None)
            for callback in callbacks:
                callback(result)

        if remote or checked:
            self._lifetime.spawn(self._coordinate(connection, work, acks, sends, remote, checked, finish))
            return
        try:
            self._store(connection, work, acks, sends, finish)
        except errors.MusterError as error:
            finish(protocol.failed(error))

    def _sends(
        self, connection: clients.ClientConnection, work: protocol.CommitWork
    ) -> list[protocol.SendMessage]:
        sends = work.sends
        if work.staged:
            staged = connection.staged
            if staged is None or staged.work != work.number or len(staged.sends) != work.staged:
                raise errors.Conflict(f"the first {work.staged} messages are not staged: start again")
            sends = staged.sends + sends
        if len(sends) > protocol.SENDS_MAX:
            raise errors.LimitExceeded(
                f"{len(sends)} messages in one transaction: the maximum is {protocol.SENDS_MAX}"
            )
        return sends

    def _store(
        self,
        connection: clients.ClientConnection,
        work: protocol.CommitWork,
        acks: Acks,
        sends: list[protocol.SendMessage],
        finish: lifetime_.ReplyCallback,
        attempt: transactions.Attempt | None = None,
    ) -> None:
        """Store a work; with an ``attempt``, this decides on the transaction."""
        size = sum(len(send.data) + len(send.meta) for send in sends)
        if sends:
            self._log.check_room(size)
        acked: dict[str, list[int]] = {}
        for holder, by_backlog in acks:
            for where, numbers in self._acknowledged(holder, by_backlog, strict=work.strict).items():
                acked[where] = acked.get(where, []) + numbers
        targets: dict[str, _Target] = {}
        copies = [self._journal_message(connection, send, targets) for send in sends]
        stored_in = journal.count_by_queue(copies)
        self._clients.create_queues(connection.identity, stored_in)
        connection.staged = None
        self._log.used_bytes += size
        if not copies and not acked and not attempt:
            finish(protocol.DispatcherReply())
            return

        def stored(_: list[int]) -> None:
            if attempt:
                self.transactions.decided(attempt)
            last = self._delivery.transfers.last_waiting(copies)
            self._reply_when_done(finish, last, [attempt.name] if attempt else [])

        def not_stored(error: errors.MusterError) -> None:
            for source, sequences in finishing:
                source.cancel_finish(sequences)
                self._delivery.pump(source)
            if attempt and not isinstance(error, errors.NotConnected):  # otherwise the log may contain it
                self.transactions.abort(attempt)
            finish(protocol.failed(error))

        record = ledger.LogRecord(
            acked=acked,
            stored=stored_in,
            last_works={connection.name: work.number},
            decided={attempt.name: attempt.participants} if attempt else {},
        )
        finishing = [(self._ledger.backlogs[where], sequences) for where, sequences in acked.items()]
        for source, sequences in finishing:
            source.start_finish(sequences)
        self._log.journal.add(journal.JournalItem(copies, record, stored, not_stored))

    def _reply_when_done(
        self, reply: lifetime_.ReplyCallback, transferred: dict[int, int], attempts: list[str]
    ) -> None:
        """Reply when the other partitions have stored what concerns them: then the sender's next message
        follows these, and a consumer receives them.
        """
        if not transferred and not attempts:
            reply(protocol.DispatcherReply())
            return

        async def wait() -> protocol.DispatcherReply:
            await self._delivery.transfers.wait_done(transferred)
            await self.transactions.wait_completed(attempts)
            return protocol.DispatcherReply()

        self._lifetime.reply_when_done(wait(), reply)

    # Transactions of several partitions.

    def _temporary_elsewhere(self, sends: list[protocol.SendMessage]) -> list[destinations.Destination]:
        """The temporary destinations of messages that are in another partition."""
        if self._log.partition_count == 1:
            return []
        parsed = map(destinations.Destination.parse, {send.destination for send in sends})
        return [
            destination
            for destination in parsed
            if destination.is_temporary and self._delivery.transfers.is_remote(destination)
        ]

    async def _coordinate(
        self,
        connection: clients.ClientConnection,
        work: protocol.CommitWork,
        acks: Acks,
        sends: list[protocol.SendMessage],
        remote: dict[int, dict[str, list[int]]],
        checked: list[destinations.Destination],
        finish: lifetime_.ReplyCallback,
    ) -> None:
        attempt = self.transactions.begin(connection.name, work.number, list(remote)) if remote else None
        own = [
            (holder, {key: numbers for key, numbers in by_backlog.items() if not _is_in(key, remote)})
            for holder, by_backlog in acks
        ]
        try:
            for destination in checked:
                partition = partitions.of_destination(destination, self._log.partition_count)
                request = peer_protocol.CheckDestination(str(destination))
                await peer_protocol.call(self._bus, partition, request)
            if attempt:
                await self.transactions.prepare(attempt, connection, remote)
            if self._clients.connections.get(connection.name) is not connection:
                raise errors.NotConnected("the connection was lost during its transaction")
            self._store(connection, work, own, sends, finish, attempt)
        except errors.MusterError as error:
            if attempt:
                self.transactions.abort(attempt)
            finish(protocol.failed(error))

    def _all_acknowledged(
        self, connection: clients.ClientConnection, acks: dict[str, list[int]]
    ) -> dict[str, list[int]]:
        return self._acknowledged(connection, acks, strict=True)

    def _acknowledged(
        self, connection: clients.ClientConnection, acks: dict[str, list[int]], *, strict: bool
    ) -> dict[str, list[int]]:
        """The acknowledged messages that are not done yet and that the connection may acknowledge.

        A consumer may have received a message from an earlier dispatcher, and another consumer the same one
        from this dispatcher. The acknowledgement of the first counts, except in a transaction, which is then
        rolled back.
        """
        acked: dict[str, list[int]] = {}
        consumes = set(connection.consumers.values())
        for key, sequences in acks.items():
            source = self._ledger.backlogs.get(key)
            # A later number would be that of a message that does not exist yet.
            stored = [number for number in sequences if number <= self._ledger.end]
            if source is None or not (key in consumes or self._may_consume(connection, key)):
                mine = []
            elif key in consumes and not strict:
                mine = [number for number in stored if not source.is_done(number)]
            else:
                mine = [number for number in stored if source.holds(number, connection.name)]
            if strict and len(mine) != len(sequences):
                raise message_errors.TransactionRolledBack(
                    "a message that the transaction acknowledges was delivered to another consumer meanwhile"
                )
            if mine:
                acked[key] = mine
        return acked

    def _may_consume(self, connection: clients.ClientConnection, key: str) -> bool:
        """Whether it may acknowledge messages received by an earlier consumer of the same connection."""
        if (subscription := self._ledger.subscriptions.get(key)) is not None:
            owned = subscription.client_id is None or (
                (subscription.identity, subscription.client_id) == (connection.identity, connection.client_id)
            )
            return owned and self._rights.may_subscribe(connection.identity, subscription.topic)
        queue = destinations.queue(key.removeprefix(ledger.QUEUE_MARK))
        if queue.is_temporary:
            return queue.may_consume(connection.name)
        return self._rights.may(connection.identity, "receive", queue.name)

    # Messages.

    def check_exists(self, destination: destinations.Destination) -> None:
        """Reject a temporary destination that was deleted, or whose connection is gone."""
        if not destination.is_temporary:
            return
        owner = self._clients.connections.get(destination.owner)
        deleted = destination.name in owner.deleted if owner else self._is_gone(destination.owner)
        if deleted:
            kind = "queue" if destination.is_queue else "topic"
            raise message_errors.InvalidDestination(f"the temporary {kind} {destination.name!r} was deleted")

    def _target(self, connection: clients.ClientConnection, text: str) -> _Target:
        """What the messages of a work to one destination have in common; rejects what it may not send to."""
        destination = destinations.Destination.parse(text)
        is_remote = self._delivery.transfers.is_remote(destination)
        if not is_remote:
            self.check_exists(destination)
        self._rights.check_may_send(connection.identity, destination)
        if not destination.is_queue:
            return _Target(destination)
        expiry_s = self._settings.queue(destination.name).expiry_s
        return _Target(
            destination,
            None if is_remote else self._log.subjects.queue(destination.name),
            round(expiry_s * 1000) if expiry_s else 0,
        )

    def _journal_message(
        self, connection: clients.ClientConnection, send: protocol.SendMessage, targets: dict[str, _Target]
    ) -> journal.JournalMessage:
        target = targets.get(send.destination)
        if target is None:
            target = targets[send.destination] = self._target(connection, send.destination)
        if len(send.meta) > protocol.HEADER_BYTES_MAX:
            raise core_messages.MessageTooLarge(
                f"the properties and headers of a message have at most {protocol.HEADER_BYTES_MAX} bytes, "
                f"not {len(send.meta)}",
                hint="put them into its body",
            )
        meta, raw = messages.decode_meta(send.meta), send.meta
        if meta.large is not None:
            self._delivery.bodies.check(meta.large, target.destination)
        changed = moved_messages.correct(meta, send.destination)
        if meta.delivery_time_ms and meta.destination is None:
            meta.destination, changed = send.destination, True  # used when it is due
        if target.expiry_ms and not meta.expiration_ms:
            start_ms = max(messages.now_ms(), meta.delivery_time_ms)
            meta.expiration_ms, changed = start_ms + target.expiry_ms, True
        if changed:
            raw = messages.encode_meta(meta).decode()
        if target.subject is not None and not meta.delivery_time_ms:
            return journal.JournalMessage(target.destination, meta, raw, send.data, target.subject)
        return self._delivery.copy_to(target.destination, meta, raw, send.data, republish=True)


def _is_in(key: str, remote: dict[int, dict[str, list[int]]]) -> bool:
    return any(key in acks for acks in remote.values())
