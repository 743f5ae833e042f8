"""Consumers and durable subscriptions: who may have which, and how they begin and end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from muster.core import errors, topics
from muster.message import destinations, protocol, selectors
from muster.message import errors as message_errors
from muster.message.dispatcher import backlog, delivery, state, topic_capture
from muster.message.dispatcher.log import journal, ledger

_SHARED_MARK: Final = "live:"  # before the key of a subscription that is not durable
#: Nobody's consumer: stands among the users of a subscription that is just being made or ended.
_BUSY: Final[backlog.ConsumerKey] = ("", 0)


@dataclass(slots=True)
class _Use:
    """Who uses a backlog, from the moment of asking on: to be stored, an answer takes a while."""

    subscription: ledger.DurableSubscription | None = None
    by: set[backlog.ConsumerKey] = field(default_factory=set)


class Attachments:
    def __init__(
        self,
        over: state.DispatcherState,
        deliver: delivery.DeliveryQueue,
        capture: topic_capture.TopicCapture,
    ) -> None:
        self._desk = over
        self._ledger = over.ledger
        self._deliver = deliver
        self._capture = capture
        self._uses: dict[str, _Use] = {}  # by backlog, or shared subscription that is not durable
        self._ending: dict[str, list[state.Answer]] = {}  # subscriptions that are just being ended

    def attach(
        self, connection: state.ClientConnection, asked: protocol.AttachConsumer, answer: state.Answer
    ) -> None:
        if asked.selector:
            selectors.compiled(asked.selector)
        destination = destinations.Destination.parse(asked.destination)
        destination.check_consumer(connection.name)
        consumer = backlog.BacklogConsumer((connection.name, asked.consumer), asked.credit)
        if destination.is_queue:
            # A temporary queue is its connection's own, but only identities with queues have any.
            right = "send" if destination.is_temporary else "receive"
            self._desk.check_queue(connection.identity, right, destination.name)
            consumer.selector = asked.selector or None
            one = self._ledger.queue(destination.name)
            self._enter(connection, asked.consumer, one.key, self._uses.setdefault(one.key, _Use()))
            self._begin(connection, one, consumer, answer)
            return
        wanted = self._subscription(connection, asked, destination)
        there = self._ledger.subscriptions.get(wanted.key)
        if there is not None and there != wanted:  # it would be ended, and another one made
            self._check_may_end(connection.identity, there.identity, there.name)
        use = self._use_of(wanted, consumer.key)
        first = not use.by
        self._enter(connection, asked.consumer, wanted.key, use)
        if not asked.durable:
            answer(protocol.DispatcherReply(epoch=self._desk.epoch, key=wanted.key))
        elif self._ledger.subscriptions.get(wanted.key) == wanted:
            self._begin(connection, self._ledger.backlogs[wanted.key], consumer, answer)
        else:
            self._subscribe(connection, wanted, use, consumer, answer, first=first)

    # Who uses what.

    def _use_of(self, wanted: ledger.DurableSubscription, consumer: backlog.ConsumerKey) -> _Use:
        use = self._uses.get(wanted.key)
        there = use.subscription if use else self._ledger.subscriptions.get(wanted.key)
        if there is not None and there.shared != wanted.shared:
            raise message_errors.IllegalState(
                f"{wanted.name!r} is the name of a subscription that is "
                + ("shared" if there.shared else "not shared")
            )
        if use is None:
            return self._uses.setdefault(wanted.key, _Use(wanted))
        if not wanted.shared and consumer not in use.by:
            raise message_errors.IllegalState(
                f"the subscription {wanted.name!r} has a consumer: one that is not shared has only one"
            )
        if use.subscription != wanted:
            raise message_errors.IllegalState(
                f"the subscription {wanted.name!r} is in use with another topic or selector"
            )
        return use

    def _enter(self, connection: state.ClientConnection, number: int, key: str, use: _Use) -> None:
        connection.consumers[number] = key
        use.by.add((connection.name, number))

    def _leave(self, connection: state.ClientConnection, number: int) -> str:
        key = connection.consumers.pop(number, "")
        self._release(key, (connection.name, number))
        return key

    def _release(self, key: str, user: backlog.ConsumerKey) -> None:
        if use := self._uses.get(key):
            use.by.discard(user)
            if not use.by:
                del self._uses[key]

    # Beginning.

    def _subscription(
        self,
        connection: state.ClientConnection,
        asked: protocol.AttachConsumer,
        destination: destinations.Destination,
    ) -> ledger.DurableSubscription:
        if not asked.subscription or not (asked.durable or asked.shared):
            raise errors.InvalidInput("a subscription that is neither durable nor shared needs no dispatcher")
        if not asked.shared and connection.client_id is None:
            raise message_errors.IllegalState("an unshared durable subscription needs a client id")
        if asked.durable and destination.is_temporary:
            raise message_errors.InvalidDestination("a temporary topic has no durable subscriptions")
        pattern = topics.TopicPattern.parse(destination.name)
        self._desk.check_may_subscribe(connection.identity, destination.name)
        client_id = None if asked.everyone else connection.client_id
        key = ledger.subscription_key(connection.identity, client_id, asked.subscription)
        if not asked.durable:
            key = f"{_SHARED_MARK}{key}"
        use = self._uses.get(key)
        there = (use.subscription if use else None) or self._ledger.subscriptions.get(key)
        return ledger.DurableSubscription(
            key=key,
            name=asked.subscription,
            topic=str(pattern),
            identity=there.identity if there else connection.identity,
            client_id=client_id,
            selector=asked.selector or None,
            no_local=connection.origin if asked.no_local and not asked.shared else None,
            shared=asked.shared,
        )

    def _subscribe(
        self,
        connection: state.ClientConnection,
        wanted: ledger.DurableSubscription,
        use: _Use,
        consumer: backlog.BacklogConsumer,
        answer: state.Answer,
        *,
        first: bool,
    ) -> None:
        def begin(_: list[int]) -> None:
            if self._ledger.subscriptions.get(wanted.key) == wanted:
                self._begin(connection, self._ledger.backlogs[wanted.key], consumer, answer)
            else:
                failed(errors.Unavailable(f"the subscription {wanted.name!r} could not be made: try again"))

        def failed(error: errors.MusterError) -> None:
            self._leave(connection, consumer.key[1])
            answer(protocol.failed(error))

        if not first:  # whoever was first has it made just now
            self._desk.journal.add(journal.JournalItem([], ledger.LogRecord(), begin, failed))
            return
        there = self._ledger.subscriptions.get(wanted.key)

        def made(_: list[int]) -> None:
            if there is not None:
                self._desk.patterns.remove(there.topic)
            begin([])
            self._release(wanted.key, _BUSY)

        def not_made(error: errors.MusterError) -> None:
            self._desk.patterns.remove(wanted.topic)
            failed(error)
            self._release(wanted.key, _BUSY)

        use.by.add(_BUSY)
        self._desk.patterns.add(wanted.topic)
        self._capture.wanted.set()
        self._desk.journal.add(
            journal.JournalItem([], ledger.LogRecord(subscribed=[wanted]), made, not_made, alone=True)
        )

    def _begin(
        self,
        connection: state.ClientConnection,
        one: backlog.Backlog,
        consumer: backlog.BacklogConsumer,
        answer: state.Answer,
    ) -> None:
        number = consumer.key[1]

        def go(_: list[int]) -> None:
            if connection.consumers.get(number) != one.key:
                return  # it has gone meanwhile
            if consumer.key not in one.consumers:
                one.attach(consumer)  # or it attaches anew, without having lost anything
            answer(protocol.DispatcherReply(epoch=self._desk.epoch, key=one.key))
            self._deliver.refill(one.key)
            self._deliver.pump(one)

        def failed(error: errors.MusterError) -> None:
            self._leave(connection, number)
            answer(protocol.failed(error))

        if one.key in self._ledger.consumed:
            go([])
        else:
            self._desk.journal.add(journal.JournalItem([], ledger.LogRecord(consumed=[one.key]), go, failed))

    # Ending.

    def detach(
        self, connection: state.ClientConnection, number: int, seen: dict[str, list[int]] | None
    ) -> None:
        """``seen`` None: the connection is lost."""
        key = self._leave(connection, number)
        one = self._ledger.backlogs.get(key)
        if one is None:
            return
        found = one.detach((connection.name, number), seen=None if seen is None else seen.get(key, []))
        self._deliver.obey(one, found)
        if one.consumers:
            self._deliver.pump(one)
        elif key not in self._uses:
            one.settle(self._ledger.end)
            self._deliver.set_live(one, live=False)
            one.unload()
            self._ledger.consumed.discard(key)  # at once: who attaches meanwhile has to say so again
            self._desk.journal.add(journal.JournalItem([], ledger.LogRecord(idle=[key])))

    def unsubscribe(
        self, connection: state.ClientConnection, asked: protocol.EndSubscription, answer: state.Answer
    ) -> None:
        identity, client_id = asked.of or (connection.identity, connection.client_id)
        if identity != connection.identity:
            self._check_may_end(connection.identity, identity, asked.name)
        key = ledger.subscription_key(identity, None if asked.everyone else client_id, asked.name)
        found = self._ledger.subscriptions.get(key)
        if found is None:
            raise message_errors.InvalidDestination(f"there is no durable subscription {asked.name!r}")
        self._check_may_end(connection.identity, found.identity, found.name)
        if key in self._ending:  # it was asked twice
            self._ending[key].append(answer)
            return
        if key in self._uses:
            raise message_errors.IllegalState(
                f"the subscription {asked.name!r} has a consumer: close it first"
            )
        answers = self._ending[key] = [answer]

        def finish(outcome: protocol.DispatcherReply) -> None:
            del self._ending[key]
            self._release(key, _BUSY)
            for tell in answers:
                tell(outcome)

        def stored(_: list[int]) -> None:
            self._desk.patterns.remove(found.topic)
            self._capture.wanted.set()
            finish(protocol.DispatcherReply())

        def failed(error: errors.MusterError) -> None:
            finish(protocol.failed(error))

        self._uses[key] = _Use(by={_BUSY})
        self._desk.journal.add(journal.JournalItem([], ledger.LogRecord(unsubscribed=[key]), stored, failed))

    def _check_may_end(self, identity: str, owner: str, name: str) -> None:
        if owner != identity and not self._desk.may(identity, "subscriptions", "end"):
            raise errors.Forbidden(f"the durable subscription {name!r} belongs to another identity")

    def drop_queue(self, sender: str, name: str, answer: state.Answer) -> None:
        """A temporary one: its owner wants it no more."""
        owner = self._desk.connections.get(destinations.queue(name).owner)
        if not name.startswith(destinations.TEMPORARY) or owner is None or owner.identity != sender:
            raise errors.Forbidden("only a temporary queue is dropped, and by its own connection")
        key = ledger.queue_key(name)
        if key in self._uses:
            raise message_errors.IllegalState("the temporary queue has consumers: close them first")
        self._desk.journal.add(
            journal.JournalItem(
                [],
                ledger.LogRecord(dropped=[key]),
                lambda _: answer(protocol.DispatcherReply()),
                lambda error: answer(protocol.failed(error)),
            )
        )

    def drop_orphans(self, is_gone: Callable[[str], bool]) -> None:
        """Temporary queues end with their connection."""
        mark = ledger.queue_key(destinations.TEMPORARY)
        orphans = [
            key
            for key in self._ledger.backlogs
            if key.startswith(mark) and is_gone(key.removeprefix(mark).split(":")[0])
        ]
        if orphans:
            self._desk.journal.add(journal.JournalItem([], ledger.LogRecord(dropped=orphans)))
