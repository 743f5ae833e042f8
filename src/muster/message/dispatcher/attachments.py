"""Consumers and durable subscriptions: permissions, attach and detach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from muster.core import errors, quotas, topics
from muster.message import destinations, partitions, protocol, selectors, settings
from muster.message import errors as message_errors
from muster.message.dispatcher import backlog, clients, delivery, lifetime, rights, topic_capture
from muster.message.dispatcher.index import lines
from muster.message.dispatcher.log import journal, ledger, message_log

_SHARED_MARK: Final = "live:"  # prefix of the key of a subscription that is not durable
#: Placeholder among the users of a subscription that is being created or ended.
_BUSY: Final[lines.ConsumerKey] = ("", 0)


@dataclass(slots=True)
class _Usage:
    """The users of a backlog, from the request on: storing it takes a while."""

    subscription: ledger.DurableSubscription | None = None
    users: set[lines.ConsumerKey] = field(default_factory=set)


class Attachments:
    def __init__(
        self,
        log: message_log.MessageLog,
        client_table: clients.ClientTable,
        message_rights: rights.MessageRights,
        message_settings: settings.MessageSettings,
        delivery_queue: delivery.DeliveryQueue,
        capture: topic_capture.TopicCapture,
    ) -> None:
        self._log = log
        self._ledger = log.ledger
        self._clients = client_table
        self._rights = message_rights
        self._settings = message_settings
        self._delivery = delivery_queue
        self._capture = capture
        self._uses: dict[str, _Usage] = {}  # by backlog, or by shared subscription that is not durable
        self._ending: dict[str, list[lifetime.ReplyCallback]] = {}  # subscriptions that are being ended
        self._starting: dict[lines.ConsumerKey, lines.BacklogConsumer] = {}  # that is being stored

    def attach(
        self,
        connection: clients.ClientConnection,
        request: protocol.AttachConsumer,
        reply: lifetime.ReplyCallback,
    ) -> None:
        if request.selector:
            _check_selector(request.selector)
        destination = destinations.Destination.parse(request.destination)
        destination.check_consumer(connection.name)
        if partitions.of_destination(destination, self._log.partition_count) != self._log.partition:
            raise errors.InvalidInput(f"{request.destination!r} is in another partition")
        consumer = lines.BacklogConsumer((connection.name, request.consumer), request.credit)
        if destination.is_queue:
            # A connection owns its temporary queues, but only identities with queue permissions have any.
            right = "send" if destination.is_temporary else "receive"
            self._rights.check_queue(connection.identity, right, destination.name)
            consumer.selector = request.selector or None
            _check_number(connection, request.consumer, ledger.queue_key(destination.name))
            queue = self._ledger.queue(destination.name)
            self._add_user(
                connection, request.consumer, queue.key, self._uses.setdefault(queue.key, _Usage())
            )
            self._start(connection, queue, consumer, reply)
            return
        subscription = self._subscription(connection, request, destination)
        _check_number(connection, request.consumer, subscription.key)
        existing = self._ledger.subscriptions.get(subscription.key)
        if existing is not None and existing != subscription:  # it would be replaced
            self._check_may_end(connection.identity, existing.identity, existing.name)
        use = self._claim(subscription, consumer.key)
        first = not use.users
        self._add_user(connection, request.consumer, subscription.key, use)
        if not request.durable:
            reply(protocol.DispatcherReply(epoch=self._log.epoch, key=subscription.key))
        elif self._ledger.subscriptions.get(subscription.key) == subscription:
            self._start(connection, self._ledger.backlogs[subscription.key], consumer, reply)
        else:
            self._subscribe(connection, subscription, use, consumer, reply, first=first)

    # Users.

    def _claim(self, subscription: ledger.DurableSubscription, consumer: lines.ConsumerKey) -> _Usage:
        use = self._uses.get(subscription.key)
        existing = use.subscription if use else self._ledger.subscriptions.get(subscription.key)
        if existing is not None and existing.shared != subscription.shared:
            raise message_errors.IllegalState(
                f"{subscription.name!r} is the name of a subscription that is "
                + ("shared" if existing.shared else "not shared")
            )
        if use is None:
            return self._uses.setdefault(subscription.key, _Usage(subscription))
        if not subscription.shared and consumer not in use.users:
            raise message_errors.IllegalState(
                f"the subscription {subscription.name!r} is not shared and has a consumer"
            )
        if use.subscription != subscription:
            raise message_errors.IllegalState(
                f"the subscription {subscription.name!r} is in use with another topic or selector"
            )
        return use

    def _add_user(self, connection: clients.ClientConnection, number: int, key: str, use: _Usage) -> None:
        connection.consumers[number] = key
        use.users.add((connection.name, number))

    def _remove_user(self, connection: clients.ClientConnection, number: int) -> str:
        key = connection.consumers.pop(number, "")
        self._release(key, (connection.name, number))
        return key

    def _release(self, key: str, user: lines.ConsumerKey) -> None:
        if use := self._uses.get(key):
            use.users.discard(user)
            if not use.users:
                del self._uses[key]

    # Start.

    def _subscription(
        self,
        connection: clients.ClientConnection,
        request: protocol.AttachConsumer,
        destination: destinations.Destination,
    ) -> ledger.DurableSubscription:
        if not request.subscription or not (request.durable or request.shared):
            raise errors.InvalidInput("a subscription must be durable or shared")
        if not request.shared and connection.client_id is None:
            raise message_errors.IllegalState("an unshared durable subscription needs a client id")
        if request.durable and destination.is_temporary:
            raise message_errors.InvalidDestination("a temporary topic has no durable subscriptions")
        pattern = topics.TopicPattern.parse(destination.name)
        self._rights.check_may_subscribe(connection.identity, destination.name)
        client_id = None if request.without_client_id else connection.client_id
        key = ledger.subscription_key(connection.identity, client_id, request.subscription)
        if not request.durable:
            key = f"{_SHARED_MARK}{key}"
        use = self._uses.get(key)
        existing = (use.subscription if use else None) or self._ledger.subscriptions.get(key)
        return ledger.DurableSubscription(
            key=key,
            name=request.subscription,
            topic=str(pattern),
            identity=existing.identity if existing else connection.identity,
            client_id=client_id,
            selector=request.selector or None,
            no_local=connection.origin if request.no_local and not request.shared else None,
            shared=request.shared,
        )

    def _subscribe(
        self,
        connection: clients.ClientConnection,
        subscription: ledger.DurableSubscription,
        use: _Usage,
        consumer: lines.BacklogConsumer,
        reply: lifetime.ReplyCallback,
        *,
        first: bool,
    ) -> None:
        def begin(_: list[int]) -> None:
            if self._ledger.subscriptions.get(subscription.key) == subscription:
                self._start(connection, self._ledger.backlogs[subscription.key], consumer, reply)
            else:
                failed(
                    errors.Unavailable(f"the subscription {subscription.name!r} was not created: try again")
                )

        def failed(error: errors.MusterError) -> None:
            self._remove_user(connection, consumer.key[1])
            reply(protocol.failed(error))

        if not first:  # the first consumer is creating it
            self._log.journal.add(journal.JournalItem([], ledger.LogRecord(), begin, failed))
            return
        existing = self._ledger.subscriptions.get(subscription.key)
        if existing is None and (refusal := self._exceeds_quota(subscription)) is not None:
            failed(refusal)
            return
        if existing is not None:  # it is replaced
            self._delivery.unload(self._ledger.backlogs[subscription.key])

        def made(_: list[int]) -> None:
            if existing is not None:
                self._log.patterns.remove(existing.topic)
                self._capture.patterns_changed.set()
            begin([])
            self._release(subscription.key, _BUSY)

        def not_made(error: errors.MusterError) -> None:
            self._log.patterns.remove(subscription.topic)
            self._capture.patterns_changed.set()
            failed(error)
            self._release(subscription.key, _BUSY)

        use.users.add(_BUSY)
        self._log.patterns.add(subscription.topic)
        self._capture.patterns_changed.set()
        self._log.journal.add(
            journal.JournalItem(
                [], ledger.LogRecord(subscribed=[subscription]), made, not_made, closes_batch=True
            )
        )

    def _exceeds_quota(self, new: ledger.DurableSubscription) -> errors.LimitExceeded | None:
        stored, identity = self._ledger.subscriptions, new.identity
        number = sum(subscription.identity == identity for subscription in stored.values())
        number += sum(
            use.subscription is not None
            and use.subscription.identity == identity
            and _BUSY in use.users
            and key not in stored
            for key, use in self._uses.items()
        )
        most = self._settings.subscriptions_per_identity
        if number < most:
            return None
        setting = "message.subscriptions_per_identity"
        return quotas.exceeded(identity, number, "durable subscriptions", most, setting)

    def _start(
        self,
        connection: clients.ClientConnection,
        source: backlog.Backlog,
        consumer: lines.BacklogConsumer,
        reply: lifetime.ReplyCallback,
    ) -> None:
        number = consumer.key[1]

        def start(_: list[int]) -> None:
            if self._starting.get(consumer.key) is consumer:
                del self._starting[consumer.key]
            if connection.consumers.get(number) != source.key:
                return  # it was detached meanwhile
            if self._ledger.backlogs.get(source.key) is not source:
                failed(errors.Unavailable(f"{source.key!r} was deleted meanwhile: try again"))
                return
            if consumer.key not in source.consumers:
                source.attach(consumer)  # otherwise it attaches again without a loss
            reply(protocol.DispatcherReply(epoch=self._log.epoch, key=source.key))
            self._delivery.pump(source)

        def failed(error: errors.MusterError) -> None:
            self._starting.pop(consumer.key, None)
            self._remove_user(connection, number)
            reply(protocol.failed(error))

        if source.key in self._ledger.consumed:
            start([])
        else:
            self._starting[consumer.key] = consumer
            self._log.journal.add(
                journal.JournalItem([], ledger.LogRecord(consumed=[source.key]), start, failed)
            )

    def credit(self, connection: clients.ClientConnection, number: int, more: int | None) -> None:
        """Grant credit to a consumer, which may still be starting. None: it has none any more."""
        key = connection.name, number
        if (starting := self._starting.get(key)) is not None:
            starting.credit = 0 if more is None else starting.credit + more
        if source := self._ledger.backlogs.get(connection.consumers.get(number, "")):
            if more is None:
                source.stop(key)
            else:
                source.credit(key, more)
                self._delivery.pump(source)

    def stop(self, connection: clients.ClientConnection, request: protocol.StopDelivery) -> None:
        for number in request.consumers:
            self.credit(connection, number, None)

    # End.

    def detach(
        self, connection: clients.ClientConnection, number: int, seen: dict[str, list[int]] | None
    ) -> None:
        """``seen`` None: the connection is lost."""
        key = self._remove_user(connection, number)
        source = self._ledger.backlogs.get(key)
        if source is None:
            return
        instructions = source.detach(
            (connection.name, number), seen=None if seen is None else seen.get(key, [])
        )
        self._delivery.execute(source, instructions)
        if source.consumers:
            self._delivery.pump(source)
        elif key not in self._uses:
            self._delivery.left(source)
            if source.counts or source.suspect > source.floor:
                return  # a successor must mark what was delivered before as redelivered
            # Now: a consumer that attaches meanwhile is recorded again
            self._ledger.consumed.discard(key)
            self._log.journal.add(journal.JournalItem([], ledger.LogRecord(idle=[key])))

    def unsubscribe(
        self,
        connection: clients.ClientConnection,
        request: protocol.EndSubscription,
        reply: lifetime.ReplyCallback,
    ) -> None:
        identity, client_id = request.owner or (connection.identity, connection.client_id)
        if identity != connection.identity:
            self._check_may_end(connection.identity, identity, request.name)
        key = ledger.subscription_key(
            identity, None if request.without_client_id else client_id, request.name
        )
        subscription = self._ledger.subscriptions.get(key)
        if subscription is None:
            raise message_errors.InvalidDestination(f"there is no durable subscription {request.name!r}")
        self._check_may_end(connection.identity, subscription.identity, subscription.name)
        if key in self._ending:  # a repeated request
            self._ending[key].append(reply)
            return
        if key in self._uses:
            raise message_errors.IllegalState(
                f"the subscription {request.name!r} has a consumer: close it first"
            )
        callbacks = self._ending[key] = [reply]

        def finish(outcome: protocol.DispatcherReply) -> None:
            del self._ending[key]
            self._release(key, _BUSY)
            for callback in callbacks:
                callback(outcome)

        def stored(_: list[int]) -> None:
            self._log.patterns.remove(subscription.topic)
            self._capture.patterns_changed.set()
            finish(protocol.DispatcherReply())

        def failed(error: errors.MusterError) -> None:
            finish(protocol.failed(error))

        self._uses[key] = _Usage(users={_BUSY})
        self._delivery.unload(self._ledger.backlogs[key])
        self._log.journal.add(journal.JournalItem([], ledger.LogRecord(unsubscribed=[key]), stored, failed))

    def _check_may_end(self, identity: str, owner: str, name: str) -> None:
        if owner != identity and not self._rights.may(identity, "subscriptions", "end"):
            raise errors.Forbidden(f"the durable subscription {name!r} belongs to another identity")

    def delete_temporary(
        self, sender: str, request: protocol.DeleteTemporary, reply: lifetime.ReplyCallback
    ) -> None:
        """Delete a temporary destination on request of its owner."""
        destination = destinations.Destination.parse(request.destination)
        owner = self._clients.connections.get(destination.owner)
        if not destination.is_temporary or owner is None or owner.identity != sender:
            raise errors.Forbidden(
                "only a temporary destination can be deleted, and only by its own connection"
            )
        key = ledger.queue_key(destination.name)
        if key in self._uses:
            raise message_errors.IllegalState("the temporary queue has consumers: close them first")
        owner.add_deleted(destination.name)
        if not destination.is_queue:
            reply(protocol.DispatcherReply())
            return
        self._log.journal.add(
            journal.JournalItem(
                [],
                ledger.LogRecord(dropped=[key]),
                lambda _: reply(protocol.DispatcherReply()),
                lambda error: reply(protocol.failed(error)),
            )
        )

    def drop_orphans(self, is_gone: Callable[[str], bool]) -> None:
        """Delete temporary queues of closed connections."""
        mark = ledger.queue_key(destinations.TEMPORARY)
        orphans = [
            key
            for key in self._ledger.backlogs
            if key.startswith(mark) and is_gone(key.removeprefix(mark).split(":")[0])
        ]
        if orphans:
            self._log.journal.add(journal.JournalItem([], ledger.LogRecord(dropped=orphans)))


def _check_selector(selector: str) -> None:
    try:
        selectors.compiled(selector)
    except errors.LimitExceeded as error:
        # For a client that attaches again, a limit is a full log, and it repeats the request. But this one
        # fails always: it was attached by a version with a larger limit.
        raise message_errors.IllegalState(
            error.message, hint="use a shorter selector; a durable subscription with another selector is new"
        ) from error


def _check_number(connection: clients.ClientConnection, number: int, key: str) -> None:
    """A consumer that is attached elsewhere as well would remain there after its connection."""
    if connection.consumers.get(number, key) != key:
        raise errors.InvalidInput(f"the consumer {number} has another destination: detach it first")
