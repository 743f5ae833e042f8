"""Creates the right link object for an attached link, from its source and target, and ends it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import proton

from muster.core import errors
from muster.core import topics as topics_
from muster.gateways.amqp.links import consumers, producers, terminus, topics, transactions
from muster.gateways.amqp.protocol import conditions, endpoints
from muster.message import destinations, protocol, selectors
from muster.message import errors as message_errors
from muster.message.amqp_format import message_codec
from muster.message.client import dispatcher_connection

if TYPE_CHECKING:
    from muster.gateways.amqp import connection as amqp_connection


SUSPENDED_MAX: Final = 100  # links of a connection


class LinkFactory:
    """A link that was detached, and not closed, may be attached again: its dynamic node remains, and so do
    the messages of a queue that it has not settled. Those of a subscription are delivered to others.
    """

    def __init__(self, owner: amqp_connection.AmqpConnection) -> None:
        self._connection = owner
        self.temporaries: set[str] = set()  # temporary destinations of the client
        self._detached_nodes: dict[endpoints.LinkKey, destinations.Destination] = {}
        self._suspended: dict[endpoints.LinkKey, consumers.OutgoingLink] = {}
        self._attaching: dict[Any, Any] = {}
        self._unfinished: dict[endpoints.LinkKey, set[asyncio.Task[None]]] = {}

    def link_opened(self, link: Any) -> None:
        """A link with the same name ends, unless JMS demands that the new one is refused."""
        attached = self._connection.running.link_of(link)
        if attached.namesake is not None and not _is_exclusive(link):
            self.release_stolen(attached.namesake)
            self._connection.running.steal(attached.namesake)
        attached.namesake = None
        self._end_suspended(attached.key)
        self._attaching[link] = link
        earlier = frozenset(self._unfinished.get(attached.key, ()))
        self._finish_first(attached.key, self._connection.spawn(self._attach(link, earlier)))

    def _finish_first(self, key: endpoints.LinkKey, task: asyncio.Task[None]) -> None:
        """Links that are attached later with the same name wait for this task."""
        tasks = self._unfinished.setdefault(key, set())
        tasks.add(task)

        def finished(_: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not tasks:
                self._unfinished.pop(key, None)

        task.add_done_callback(finished)

    async def _attach(self, link: Any, earlier: frozenset[asyncio.Task[None]]) -> None:
        await self._connection.opened.wait()
        if earlier:
            await asyncio.wait(earlier)
        if self._is_gone(link):
            return
        try:
            if (problem := self._connection.running.link_of(link).problem) is not None:
                raise problem
            if link.is_sender:
                await self._attach_outgoing(link)
            else:
                await self._attach_producer(link)
        except errors.MusterError as error:
            if not self._is_gone(link):
                self._refuse(link, error)
        finally:
            self._link_closed(link)

    def _link_closed(self, pointer: Any) -> None:
        """The client closed the link, whether it is already attached or not."""
        self._attaching.pop(pointer, None)

    def session_closed(self, session: Any) -> None:
        for pointer in [pointer for pointer, link in self._attaching.items() if link.session == session]:
            self._link_closed(pointer)
        for key, suspended in list(self._suspended.items()):
            if suspended.link.session.wrapper == session:
                self._end_suspended(key)

    def _end_suspended(self, key: endpoints.LinkKey) -> None:
        if (suspended := self._suspended.pop(key, None)) is not None:
            self._drop_unsettled(suspended)
            self.release(suspended)

    def end_settled(self) -> None:
        """Messages were settled: end suspended links that have none any more."""
        for key, suspended in list(self._suspended.items()):
            if not any(map(self._connection.outcomes.is_unsettled, suspended.retained)):
                self._end_suspended(key)

    def close_outgoing(self, outgoing: consumers.OutgoingLink, condition: str, why: str) -> None:
        """Close the link; the client may attach it again."""
        if self._suspended.get(outgoing.link.key) is outgoing:
            self._end_suspended(outgoing.link.key)
            return
        self.forget(outgoing.wrapper)
        self.release(outgoing)
        self._connection.running.close(outgoing.link, condition, why)
        self._connection.flush_soon()

    def release_stolen(self, link: endpoints.AmqpLink) -> None:
        """The client has attached another link with this name: release what this one has."""
        outgoing = self.forget(link.wrapper)
        if outgoing is not None:
            self._keep_node(outgoing)
            self.release(outgoing)

    def _keep_node(self, outgoing: consumers.OutgoingLink) -> None:
        if outgoing.temporary is not None:
            self._detached_nodes[outgoing.link.key] = outgoing.temporary

    def release(self, outgoing: consumers.OutgoingLink, *, with_session: bool = False) -> None:
        """``with_session``: the session of the link ends, and a node that was made for the link with it."""
        task = self._connection.spawn(self._release(outgoing, with_session=with_session))
        self._finish_first(outgoing.link.key, task)

    async def _release(self, outgoing: consumers.OutgoingLink, *, with_session: bool) -> None:
        await outgoing.close(destroy=False)
        if with_session and outgoing.temporary is not None:
            await self.drop(outgoing.temporary)

    def forget(self, pointer: Any) -> consumers.OutgoingLink | None:
        """Remove a link. Messages that its client did not settle are delivered again."""
        self._link_closed(pointer)
        if (producer := self._connection.producer_links.pop(pointer, None)) is not None:
            self._connection.transactions.abandon(producer.link)
        outgoing = self._connection.outgoing_links.pop(pointer, None)
        if outgoing is not None:
            self._drop_unsettled(outgoing)
        return outgoing

    def _drop_unsettled(self, outgoing: consumers.OutgoingLink) -> None:
        session = outgoing.link.session
        for place, (holder, key, number, _) in list(session.unsettled.items()):
            if holder is outgoing:
                session.settle(place)
                self._connection.outcomes.forget(key, number)
        if session.over_unsettled_limit:
            self._connection.running.check_unsettled(session)

    def detached(self, link: Any, *, destroy: bool) -> None:
        task = self._connection.spawn(self._detach(link, destroy=destroy))
        self._finish_first((link.name, link.is_receiver), task)

    async def _detach(self, link: Any, *, destroy: bool) -> None:
        outgoing = self._connection.outgoing_links.get(link)
        producer = self._connection.producer_links.get(link)
        suspended = not destroy and outgoing is not None and self._suspend(outgoing)
        if suspended:
            self._link_closed(link)
            del self._connection.outgoing_links[link]
        else:
            self.forget(link)
        await self._connection.opened.wait()  # see `_begin`
        try:
            if outgoing is not None:
                await (outgoing.suspend() if suspended else outgoing.close(destroy=destroy))
                if not destroy:
                    self._keep_node(outgoing)
                elif outgoing.temporary is not None:
                    await self.drop(outgoing.temporary)
            if producer is not None and producer.link.settles_second:  # its next attach names the outcomes
                await self._connection.jms.outbox.wait_idle(dispatcher_connection.CLOSE_S)
            self.end_settled()
        except errors.MusterError as error:
            link.condition = conditions.condition_of(error)
            self._end_suspended((link.name, link.is_receiver))
        if self._connection.running.has_link(link):  # its session may have ended meanwhile
            self._connection.running.answer_detach(link, closed=destroy)
            self._connection.running.free(link)

    def _suspend(self, outgoing: consumers.OutgoingLink) -> bool:
        """Whether a link that was detached still has messages that its client may settle."""
        if not outgoing.may_suspend:
            return False
        unsettled = outgoing.link.session.unsettled.values()
        outgoing.retained = {(key, number) for holder, key, number, _ in unsettled if holder is outgoing}
        if not outgoing.retained:
            return False
        while len(self._suspended) >= SUSPENDED_MAX:
            self._end_suspended(next(iter(self._suspended)))
        self._suspended[outgoing.link.key] = outgoing
        return True

    def _is_gone(self, link: Any) -> bool:
        return link not in self._attaching or not self._connection.running.has_link(link)

    def _check_is_there(self, link: Any) -> None:
        """To be called after each wait; there is no link to report the error on."""
        if self._is_gone(link):
            raise errors.NotConnected("the client has detached the link")

    def _refuse(self, link: Any, error: errors.MusterError) -> None:
        link.source.type = link.target.type = proton.Terminus.UNSPECIFIED
        link.open()
        link.condition = conditions.condition_of(error)
        link.close()

    async def _temporary(self, link: Any, capabilities: frozenset[str]) -> destinations.Destination:
        """A node for the link. One that is no temporary destination of JMS is a queue of all connections."""
        topic = "temporary-topic" in capabilities
        kept = self._detached_nodes.pop((link.name, link.is_receiver), None)
        if kept is not None and kept.is_queue is not topic:
            return kept
        connection, number = self._connection.jms.name, self._connection.jms.next_number()
        if topic:
            made = destinations.temporary_topic(connection, number)
        else:
            end = "" if "temporary-queue" in capabilities else destinations.OPEN
            name = f"{destinations.TEMPORARY}{connection}:{number}{end}"
            made = destinations.Destination(destinations.DestinationKind.TEMPORARY_QUEUE, name)
        self.check_may_send(made)
        await self._connection.jms.own_temporary(made)
        self._check_is_there(link)
        self.temporaries.add(made.name)
        return made

    async def drop(self, temporary: destinations.Destination) -> None:
        self.temporaries.discard(temporary.name)
        await self._connection.jms.request(protocol.DeleteTemporary(str(temporary)))

    async def _check_there(self, link: Any, destination: destinations.Destination) -> None:
        """Reject temporary destinations of other connections, and those that were deleted."""
        try:
            destination.check_consumer(self._connection.jms.name)
        except errors.Forbidden as error:
            raise message_errors.IllegalState(error.message) from error
        if not destination.is_temporary or destination.name in self.temporaries:
            return
        if destination.owner == self._connection.jms.name:
            raise message_errors.InvalidDestination(
                f"the temporary destination {destination.name!r} was deleted"
            )
        await self._check_not_deleted(link, destination)

    async def _check_not_deleted(self, link: Any, destination: destinations.Destination) -> None:
        await self._connection.jms.request(protocol.CheckTemporary(str(destination)))
        self._check_is_there(link)

    def check_may_send(self, destination: destinations.Destination) -> None:
        """Check on attach, not on the first message: the broker would drop it silently."""
        identity, may = self._connection.jms.bus.identity, self._connection.gateway.may
        if destination.is_queue and not may(identity, "send", destination.name):
            raise errors.Forbidden(f"{identity} may not send to the queue {destination.name!r}")
        if destination.is_queue:
            self._connection.gateway.check_exists(destination.name)
        if not destination.is_queue and not may(identity, "pub", destination.subject):
            raise errors.Forbidden(f"{identity} may not publish on {destination.name!r}")

    def _check_may_browse(self, queue: destinations.Destination) -> None:
        """Check on attach: later, only the connection could report the error."""
        identity = self._connection.jms.bus.identity
        if not queue.is_temporary and not self._connection.gateway.may(identity, "browse", queue.name):
            raise errors.Forbidden(f"{identity} may not browse the queue {queue.name!r}")
        self._connection.gateway.check_exists(queue.name)

    async def _attach_producer(self, link: Any) -> None:
        """Attach a link on which the client sends."""
        target = link.remote_target
        link.source.copy(link.remote_source)
        link.target.copy(target)
        capabilities = terminus.symbols(target.capabilities)
        destination: destinations.Destination | None = None
        coordinator = target.type == proton.Terminus.COORDINATOR
        if target.dynamic:
            destination = await self._temporary(link, capabilities)
            link.target.address = destination.name
            link.target.dynamic = True
            terminus.set_lifetime(link.target.properties)
            holder = consumers.OutgoingLink(self._connection, link)
            holder.temporary = destination
            self._connection.outgoing_links[link] = holder
        elif not coordinator and target.address:
            destination = message_codec.address(target.address, capabilities)
            self.check_may_send(destination)
            if destination.is_temporary and destination.name not in self.temporaries:
                await self._check_not_deleted(link, destination)
        elif coordinator:
            transactions.check_capabilities(capabilities)
            terminus.set_symbols(link.target.capabilities, transactions.CAPABILITIES)
        link.max_message_size = self._connection.gateway.max_message_bytes
        _confirm_settle_modes(link)
        link.open()
        self._connection.running.sync()
        self._connection.producer_links[link] = producers.ProducerLink(
            self._connection, link, destination, coordinator=coordinator
        )

    async def _attach_outgoing(self, link: Any) -> None:
        """Attach a link on which the client receives."""
        source = link.remote_source
        name, bar, rest = link.name.partition("|")
        without_client_id = bar == "|" and rest.startswith("global")
        if source.type == proton.Terminus.UNSPECIFIED:
            await self._attach_unsubscribe(link, name, without_client_id=without_client_id)
            return
        capabilities = terminus.symbols(source.capabilities)
        durable = source.durability != proton.Terminus.NONDURABLE
        if source.dynamic:
            destination = await self._temporary(link, capabilities)
        else:
            destination = message_codec.address(source.address or "", capabilities)
            if destination.kind.value in capabilities and not destination.is_queue:
                _check_is_unambiguous(destination)
            await self._check_there(link, destination)
        filters = terminus.filters(source.filter, topic=not destination.is_queue)
        if filters.selector:
            selectors.compiled(filters.selector)
        jms = self._connection.jms
        request = protocol.AttachConsumer(
            jms.name,
            jms.next_number(),
            str(destination),
            subscription=None if destination.is_queue else name,
            durable=durable and not destination.is_queue,
            shared="shared" in capabilities,
            selector=filters.selector,
            no_local=filters.no_local,
            without_client_id=without_client_id,
        )
        outgoing: consumers.OutgoingLink
        if destination.is_queue and source.distribution_mode == proton.Terminus.DIST_MODE_COPY:
            self._check_may_browse(destination)
            outgoing = consumers.BrowserLink(self._connection, link, destination.name, filters.selector)
        elif destination.is_queue or durable:
            outgoing = consumers.DispatcherLink(self._connection, link, request)
        else:
            outgoing = topics.TopicLink(self._connection, link, destination, request)
        await outgoing.open()
        if self._is_gone(link):
            await outgoing.close(destroy=False)
            return
        link.source.copy(source)
        is_moved = destination.is_queue and not isinstance(outgoing, consumers.BrowserLink)
        link.source.distribution_mode = (
            proton.Terminus.DIST_MODE_MOVE if is_moved else proton.Terminus.DIST_MODE_COPY
        )
        terminus.set_filters(link.source.filter, filters.applied)
        terminus.set_outcomes(link.source.outcomes)
        link.target.copy(link.remote_target)
        if source.dynamic:
            outgoing.temporary = destination
            link.source.address = destination.name
            terminus.set_lifetime(link.source.properties)
        _confirm_settle_modes(link)
        self._connection.outgoing_links[link] = outgoing
        link.open()
        self._connection.running.sync()
        outgoing.listen_for_credit()
        await outgoing.flow()

    async def _attach_unsubscribe(self, link: Any, name: str, *, without_client_id: bool) -> None:
        rows = (await self._connection.jms.request(protocol.ListSubscriptions())).subscriptions
        self._check_is_there(link)
        client_id = None if without_client_id else self._connection.jms.client_id
        identity, may = self._connection.jms.bus.identity, self._connection.gateway.may
        for row in rows:
            owned = row.identity == identity
            if (row.subscription, row.client_id) == (name, client_id) and (owned or without_client_id):
                if not owned and not may(identity, "subscriptions", "end"):
                    raise errors.Forbidden(f"the durable subscription {name!r} belongs to another identity")
                link.source.type = proton.Terminus.SOURCE
                link.source.address = row.topic
                link.source.durability = proton.Terminus.DELIVERIES
                link.source.expiry_policy = proton.Terminus.EXPIRE_NEVER
                self._connection.outgoing_links[link] = consumers.UnsubscribeLink(
                    self._connection,
                    link,
                    name,
                    without_client_id=without_client_id,
                )
                link.open()
                return
        raise message_errors.InvalidDestination(f"there is no durable subscription {name!r}")


def _is_exclusive(link: Any) -> bool:
    """Whether the link is for a second consumer of an unshared durable subscription. JMS demands an error
    (8.3.3), while AMQP lets it replace the first.
    """
    source = link.remote_source
    capabilities = terminus.symbols(source.capabilities)
    durable = source.durability != proton.Terminus.NONDURABLE
    return bool(link.is_sender and durable and "topic" in capabilities and "shared" not in capabilities)


def _confirm_settle_modes(link: Any) -> None:
    """All modes are supported. Some clients end a link whose modes differ from those they requested."""
    link.snd_settle_mode = link.remote_snd_settle_mode
    link.rcv_settle_mode = link.remote_rcv_settle_mode


def _check_is_unambiguous(topic: destinations.Destination) -> None:
    """A JMS client, which states the kind of the destination, uses the same name to send. A name with
    wildcards can only be a pattern, because a producer may not have it; but with ``=`` it may have been meant
    as a path, of which the same text is a topic.
    """
    name = topic.name
    if topic.is_temporary or topics_.has_notation(name) or not ("=" in name and "/" in name):
        return
    try:
        topics_.Topic.parse(name)
    except errors.InvalidInput as error:
        raise message_errors.InvalidDestination(
            f"{name!r} is a pattern of tags or the path of a topic",
            hint=f"name the notation: 'tags:{name}' or 'path:{name}'",
        ) from error
