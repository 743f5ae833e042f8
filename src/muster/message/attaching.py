"""Consumers and durable subscriptions: who may have which, and how they begin and end."""

from __future__ import annotations

from muster.core import errors, topics
from muster.message import (
    backlog,
    capturing,
    delivering,
    desk,
    destinations,
    faults,
    journal,
    ledger,
    protocol,
    selectors,
)


class Attaching:
    def __init__(self, over: desk.Desk, deliver: delivering.Delivering, capture: capturing.Capturing) -> None:
        self._desk = over
        self._ledger = over.ledger
        self._deliver = deliver
        self._capture = capture

    def attach(self, connection: desk.Connection, asked: protocol.Attach, answer: desk.Answer) -> None:
        if asked.selector:
            selectors.compiled(asked.selector)
        destination = destinations.Destination.parse(asked.destination)
        consumer = backlog.Consumer((connection.name, asked.consumer), asked.credit)
        if destination.is_queue:
            owner = destination.name.removeprefix(destinations.TEMPORARY).split(":")[0]
            if destination.is_temporary and owner != connection.name:
                raise errors.Forbidden("only its own connection consumes from a temporary queue")
            consumer.selector = asked.selector or None
            self._begin(connection, self._ledger.queue(destination.name), consumer, answer)
            return
        wanted = self._subscription(connection, asked, destination)
        there = self._ledger.subscriptions.get(wanted.key)
        active = bool(there and self._ledger.backlogs[wanted.key].consumers)
        if active and not (wanted.shared and there == wanted):
            mine = self._ledger.backlogs[wanted.key].consumers.get(consumer.key)
            if mine is None or there != wanted:
                what = "has a consumer" if not wanted.shared else "is in use with another topic or selector"
                raise faults.IllegalState(f"the durable subscription {asked.subscription!r} {what}")
        if there == wanted:
            self._begin(connection, self._ledger.backlogs[wanted.key], consumer, answer)
            return
        if there is not None and there.shared != wanted.shared:
            raise faults.IllegalState(
                f"{asked.subscription!r} is the name of a subscription that is "
                + ("shared" if there.shared else "not shared")
            )

        def stored(_: list[int]) -> None:
            if there is not None:
                self._desk.patterns.remove(there.topic)
            self._begin(connection, self._ledger.backlogs[wanted.key], consumer, answer)

        self._desk.patterns.add(wanted.topic)
        self._capture.wanted.set()
        self._add(ledger.Record(subscribed=[wanted]), stored, answer, alone=True)

    def _add(
        self, record: ledger.Record, stored: journal.Stored, answer: desk.Answer, *, alone: bool = False
    ) -> None:
        self._desk.journal.add(
            journal.Item([], record, stored, lambda error: answer(protocol.failed(error)), alone=alone)
        )

    def _subscription(
        self, connection: desk.Connection, asked: protocol.Attach, destination: destinations.Destination
    ) -> ledger.Subscription:
        if not asked.subscription or not asked.durable:
            raise errors.InvalidInput("the dispatcher keeps durable subscriptions only, and they have names")
        if not asked.shared and connection.client_id is None:
            raise faults.IllegalState("an unshared durable subscription needs a client id")
        pattern = topics.Pattern.parse(destination.name)
        for subject in pattern.subjects:
            if not self._desk.may(connection.identity, "sub", subject):
                raise errors.Forbidden(f"{connection.identity} may not subscribe to {destination.name!r}")
        client_id = None if asked.everyone else connection.client_id
        return ledger.Subscription(
            key=ledger.subscription_key(client_id, asked.subscription),
            name=asked.subscription,
            topic=str(pattern),
            client_id=client_id,
            selector=asked.selector or None,
            no_local=connection.origin if asked.no_local and not asked.shared else None,
            shared=asked.shared,
        )

    def _begin(
        self,
        connection: desk.Connection,
        one: backlog.Backlog,
        consumer: backlog.Consumer,
        answer: desk.Answer,
    ) -> None:
        begun = protocol.Answer(epoch=self._desk.epoch, key=one.key)
        if consumer.key in one.consumers:  # it attaches anew without having lost anything
            answer(begun)
            return
        connection.consumers[consumer.key[1]] = one.key

        def go(_: list[int]) -> None:
            if connection.name not in self._desk.connections:
                return
            one.attach(consumer)
            answer(begun)
            self._deliver.refill(one.key)
            self._deliver.pump(one)

        if one.key in self._ledger.consumed:
            go([])
        else:
            self._add(ledger.Record(consumed=[one.key]), go, answer)

    def detach(self, connection: desk.Connection, number: int, seen: dict[str, list[int]] | None) -> None:
        """``seen`` None: the connection is lost."""
        key = connection.consumers.pop(number, None)
        one = self._ledger.backlogs.get(key or "")
        if one is None or key is None:
            return
        found = one.detach((connection.name, number), seen=None if seen is None else seen.get(key, []))
        self._deliver.obey(one, found)
        if one.consumers:
            self._deliver.pump(one)
        else:
            one.settle(self._ledger.end)
            self._deliver.set_live(one, live=False)
            one.unload()
            self._ledger.consumed.discard(key)  # at once: who attaches meanwhile has to say so again
            self._desk.journal.add(journal.Item([], ledger.Record(idle=[key])))

    def unsubscribe(
        self, connection: desk.Connection, asked: protocol.Unsubscribe, answer: desk.Answer
    ) -> None:
        key = ledger.subscription_key(None if asked.everyone else connection.client_id, asked.name)
        found = self._ledger.subscriptions.get(key)
        if found is None:
            raise faults.InvalidDestination(f"there is no durable subscription {asked.name!r}")
        if self._ledger.backlogs[key].consumers:
            raise faults.IllegalState(f"the durable subscription {asked.name!r} has a consumer")

        def stored(_: list[int]) -> None:
            self._desk.patterns.remove(found.topic)
            self._capture.wanted.set()
            answer(protocol.Answer())

        self._add(ledger.Record(unsubscribed=[key]), stored, answer)

    def drop_queue(self, sender: str, name: str, answer: desk.Answer) -> None:
        """A temporary one: its owner wants it no more."""
        owner = self._desk.connections.get(name.removeprefix(destinations.TEMPORARY).split(":")[0])
        if not name.startswith(destinations.TEMPORARY) or owner is None or owner.identity != sender:
            raise errors.Forbidden("only a temporary queue is dropped, and by its own connection")
        key = ledger.queue_key(name)
        if (one := self._ledger.backlogs.get(key)) and one.consumers:
            raise faults.IllegalState("the temporary queue has consumers")
        self._add(ledger.Record(dropped=[key]), lambda _: answer(protocol.Answer()), answer)

    def drop_orphans(self) -> None:
        """Temporary queues end with their connection."""
        mark = ledger.queue_key(destinations.TEMPORARY)
        orphans = [
            key
            for key in self._ledger.backlogs
            if key.startswith(mark) and key.removeprefix(mark).split(":")[0] not in self._desk.connections
        ]
        if orphans:
            self._desk.journal.add(journal.Item([], ledger.Record(dropped=orphans)))
