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
        self, connection: state.ClientConnection, request: protocol.AttachConsumer, answer: state.Answer
    ) -> None:
        if request.selector:
            selectors.compiled(request.selector)
        destination = destinations.Destination.parse(request.destination)
        destination.check_consumer(connection.name)
        consumer = backlog.BacklogConsumer((connection.name, request.consumer), request.credit)
        if destination.is_queue:
            # A temporary queue is its connection's own, but only identities with queues have any.
            right = "send" if destination.is_temporary else "receive"
            self._desk.check_queue(connection.identity, right, destination.name)
            consumer.selector = request.selector or None
            queue = self._ledger.queue(destination.name)
            self._enter(connection, request.consumer, queue.key, self._uses.setdefault(queue.key, _Use()))
            self._begin(connection, queue, consumer, answer)
            return
        subscription = self._subscription(connection, request, destination)
        there = self._ledger.subscriptions.get(subscription.key)
        if there is not None and there != subscription:  # it would be ended, and another one made
            self._check_may_end(connection.identity, there.identity, there.name)
        use = self._use_of(subscription, consumer.key)
        first = not use.by
        self._enter(connection, request.consumer, subscription.key, use)
        if not request.durable:
            answer(protocol.DispatcherReply(epoch=self._desk.epoch, key=subscription.key))
        elif self._ledger.subscriptions.get(subscription.key) == subscription:
            self._begin(connection, self._ledger.backlogs[subscription.key], consumer, answer)
        else:
            self._subscribe(connection, subscription, use, consumer, answer, first=first)

    # Who uses what.

    def _use_of(self, subscription: ledger.DurableSubscription, consumer: backlog.ConsumerKey) -> _Use:
        use = self._uses.get(subscription.key)
        there = use.subscription if use else self._ledger.subscriptions.get(subscription.key)
        if there is not None and there.shared != subscription.shared:
            raise message_errors.IllegalState(
                f"{subscription.name!r} is the name of a subscription that is "
                + ("shared" if there.shared else "not shared")
            )
        if use is None:
            return self._uses.setdefault(subscription.key, _Use(subscription))
        if not subscription.shared and consumer not in use.by:
            raise message_errors.IllegalState(
                f"the subscription {subscription.name!r} has a consumer: one that is not shared has only one"
            )
        if use.subscription != subscription:
            raise message_errors.IllegalState(
                f"the subscription {subscription.name!r} is in use with another topic or selector"
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
        request: protocol.AttachConsumer,
        destination: destinations.Destination,
    ) -> ledger.DurableSubscription:
        if not request.subscription or not (request.durable or request.shared):
            raise errors.InvalidInput("a subscription that is neither durable nor shared needs no dispatcher")
        if not request.shared and connection.client_id is None:
            raise message_errors.IllegalState("an unshared durable subscription needs a client id")
        if request.durable and destination.is_temporary:
            raise message_errors.InvalidDestination("a temporary topic has no durable subscriptions")
        pattern = topics.TopicPattern.parse(destination.name)
        self._desk.check_may_subscribe(connection.identity, destination.name)
        client_id = None if request.everyone else connection.client_id
        key = ledger.subscription_key(connection.identity, client_id, request.subscription)
        if not request.durable:
            key = f"{_SHARED_MARK}{key}"
        use = self._uses.get(key)
        there = (use.subscription if use else None) or self._ledger.subscriptions.get(key)
        return ledger.DurableSubscription(
            key=key,
            name=request.subscription,
            topic=str(pattern),
            identity=there.identity if there else connection.identity,
            client_id=client_id,
            selector=request.selector or None,
            no_local=connection.origin if request.no_local and not request.shared else None,
            shared=request.shared,
        )

    def _subscribe(
        self,
        connection: state.ClientConnection,
        subscription: ledger.DurableSubscription,
        use: _Use,
        consumer: backlog.BacklogConsumer,
        answer: state.Answer,
        *,
        first: bool,
    ) -> None:
        def begin(_: list[int]) -> None:
            if self._ledger.subscriptions.get(subscription.key) == subscription:
                self._begin(connection, self._ledger.backlogs[subscription.key], consumer, answer)
            else:
                failed(
                    errors.Unavailable(f"the subscription {subscription.name!r} could not be made: try again")
                )

        def failed(error: errors.MusterError) -> None:
            self._leave(connection, consumer.key[1])
            answer(protocol.failed(error))

        if not first:  # whoever was first has it made just now
            self._desk.journal.add(journal.JournalItem([], ledger.LogRecord(), begin, failed))
            return
        there = self._ledger.subscriptions.get(subscription.key)

        def made(_: list[int]) -> None:
            if there is not None:
                self._desk.patterns.remove(there.topic)
            begin([])
            self._release(subscription.key, _BUSY)

        def not_made(error: errors.MusterError) -> None:
            self._desk.patterns.remove(subscription.topic)
            failed(error)
            self._release(subscription.key, _BUSY)

        use.by.add(_BUSY)
        self._desk.patterns.add(subscription.topic)
        self._capture.wanted.set()
        self._desk.journal.add(
            journal.JournalItem([], ledger.LogRecord(subscribed=[subscription]), made, not_made, alone=True)
        )

    def _begin(
        self,
        connection: state.ClientConnection,
        source: backlog.Backlog,
        consumer: backlog.BacklogConsumer,
        answer: state.Answer,
    ) -> None:
        number = consumer.key[1]

        def go(_: list[int]) -> None:
            if connection.consumers.get(number) != source.key:
                return  # it has gone meanwhile
            if consumer.key not in source.consumers:
                source.attach(consumer)  # or it attaches anew, without having lost anything
            answer(protocol.DispatcherReply(epoch=self._desk.epoch, key=source.key))
            self._deliver.refill(source.key)
            self._deliver.pump(source)

        def failed(error: errors.MusterError) -> None:
            self._leave(connection, number)
            answer(protocol.failed(error))

        if source.key in self._ledger.consumed:
            go([])
        else:
            self._desk.journal.add(
                journal.JournalItem([], ledger.LogRecord(consumed=[source.key]), go, failed)
            )

    # Ending.

    def detach(
        self, connection: state.ClientConnection, number: int, seen: dict[str, list[int]] | None
    ) -> None:
        """``seen`` None: the connection is lost."""
        key = self._leave(connection, number)
        source = self._ledger.backlogs.get(key)
        if source is None:
            return
        instructions = source.detach(
            (connection.name, number), seen=None if seen is None else seen.get(key, [])
        )
        self._deliver.obey(source, instructions)
        if source.consumers:
            self._deliver.pump(source)
        elif key not in self._uses:
            source.settle(self._ledger.end)
            self._deliver.set_live(source, live=False)
            source.unload()
            self._ledger.consumed.discard(key)  # at once: who attaches meanwhile has to say so again
            self._desk.journal.add(journal.JournalItem([], ledger.LogRecord(idle=[key])))

    def unsubscribe(
        self, connection: state.ClientConnection, request: protocol.EndSubscription, answer: state.Answer
    ) -> None:
        identity, client_id = request.of or (connection.identity, connection.client_id)
        if identity != connection.identity:
            self._check_may_end(connection.identity, identity, request.name)
        key = ledger.subscription_key(identity, None if request.everyone else client_id, request.name)
        subscription = self._ledger.subscriptions.get(key)
        if subscription is None:
            raise message_errors.InvalidDestination(f"there is no durable subscription {request.name!r}")
        self._check_may_end(connection.identity, subscription.identity, subscription.name)
        if key in self._ending:  # it was asked twice
            self._ending[key].append(answer)
            return
        if key in self._uses:
            raise message_errors.IllegalState(
                f"the subscription {request.name!r} has a consumer: close it first"
            )
        answers = self._ending[key] = [answer]

        def finish(outcome: protocol.DispatcherReply) -> None:
            del self._ending[key]
            self._release(key, _BUSY)
            for tell in answers:
                tell(outcome)

        def stored(_: list[int]) -> None:
            self._desk.patterns.remove(subscription.topic)
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
