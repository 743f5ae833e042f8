"""Requests of the dispatchers of other partitions."""

from __future__ import annotations

import contextlib

from muster.core import errors
from muster.message import destinations, messages, protocol
from muster.message import errors as message_errors
from muster.message.dispatcher import delivery, works
from muster.message.dispatcher import lifetime as lifetime_
from muster.message.dispatcher.log import journal, ledger, message_log
from muster.message.dispatcher.peers import peer_protocol


class PeerRequests:
    def __init__(
        self,
        log: message_log.MessageLog,
        lifetime: lifetime_.DispatcherLifetime,
        delivery_queue: delivery.DeliveryQueue,
        all_works: works.Works,
    ) -> None:
        self._log = log
        self._lifetime = lifetime
        self._delivery = delivery_queue
        self._works = all_works

    def handle(self, request: peer_protocol.PeerRequest, reply: lifetime_.ReplyCallback) -> None:
        transactions = self._works.transactions
        match request:
            case peer_protocol.TransferMessages():
                self._receive(request, reply)
            case peer_protocol.PrepareAcks():
                self._lifetime.reply_when_done(transactions.reserve(request), reply)
            case peer_protocol.ResolveAcks():
                self._lifetime.reply_when_done(transactions.resolve(request), reply)
            case peer_protocol.AskOutcome():
                self._lifetime.reply_when_done(transactions.outcome(request.attempt), reply)
            case peer_protocol.StoreBody():
                self._lifetime.reply_when_done(self._delivery.bodies.store(request), reply)
            case peer_protocol.CheckDestination():
                self._works.check_exists(destinations.Destination.parse(request.destination))
                reply(protocol.DispatcherReply())

    def _receive(self, request: peer_protocol.TransferMessages, reply: lifetime_.ReplyCallback) -> None:
        log, transfers = self._log, self._delivery.transfers
        size = sum(len(message.data) + len(message.meta) for message in request.messages)
        log.check_room(size)
        new, last = transfers.accept(request)
        copies = [copy for message in new if (copy := self._copy(message)) is not None]
        log.used_bytes += size

        def done() -> None:
            if transfers.stored(last):
                reply(protocol.DispatcherReply())
            else:
                reply(protocol.failed(errors.Overloaded("the messages are not stored", retry_after_s=0.1)))

        record = ledger.LogRecord(
            stored=journal.count_by_queue(copies),
            received={message.channel: message.number for message in new},
        )
        log.journal.add(journal.JournalItem(copies, record, lambda _: done(), lambda _: done()))

    def _copy(self, message: peer_protocol.TransferredMessage) -> journal.JournalMessage | None:
        """None: its temporary queue was deleted."""
        destination = destinations.Destination.parse(message.destination)
        with contextlib.suppress(message_errors.InvalidDestination):
            self._works.check_exists(destination)
            meta = messages.decode_meta(message.meta)
            return self._delivery.copy_to(
                destination, meta, message.meta, message.data, republish=message.republish, due=message.due
            )
        return None
