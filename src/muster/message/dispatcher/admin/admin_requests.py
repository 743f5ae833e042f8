"""Administrative requests on queues: authorized, executed once and recorded in the audit log.

The other requests to the dispatcher are message traffic; its log records them. Lists and browsing may look at
much, so they are charged to their identity and share the event loop in slices (`muster.bus.rpc.admission`).
"""

from __future__ import annotations

import functools
from typing import Any, Final

from muster.bus import api
from muster.bus.rpc import request_audit, requests, server
from muster.core import errors
from muster.message import protocol, settings
from muster.message.dispatcher import rights
from muster.message.dispatcher.admin import queue_admin, scheduled
from muster.message.dispatcher.log import message_log


class _Codec:
    """Encodes replies like all other replies of the dispatcher."""

    def __init__(self, log: message_log.MessageLog) -> None:
        self._log = log

    def result(self, value: protocol.DispatcherReply) -> bytes:
        value.epoch, value.partitions = self._log.epoch, self._log.partition_count
        return protocol.encode(value)

    def error(self, error: errors.MusterError) -> bytes:
        return self.result(protocol.failed(error))


class AdminRequests:
    def __init__(
        self,
        bus: api.Bus,
        log: message_log.MessageLog,
        message_rights: rights.MessageRights,
        message_settings: settings.MessageSettings,
        queues: queue_admin.QueueAdmin,
        scheduled_messages: scheduled.ScheduledMessages,
    ) -> None:
        self._log = log
        self._rights = message_rights
        self._settings = message_settings
        self._admin = queues
        self._scheduled = scheduled_messages
        reads: dict[Any, Any] = {
            protocol.BrowseQueue: self._browse,
            protocol.ListQueues: self._list_queues,
            protocol.ListSubscriptions: self._list_subscriptions,
            protocol.ListScheduled: self._list_scheduled,
        }
        self._operations: Final = {
            kind: server.RpcOperation(
                "request", execute, audited=False, decode=protocol.decode_request, once=False
            )
            for kind, execute in reads.items()
        } | {
            protocol.PurgeQueue: server.RpcOperation(
                "request", self._purge, what="purge", decode=protocol.decode_request
            ),
            protocol.MoveMessages: server.RpcOperation(
                "request", self._move, what="move", decode=protocol.decode_request
            ),
        }
        audit = request_audit.RequestAudit(bus, protocol.PART, epoch=lambda: log.epoch)
        self.server = server.RpcServer(bus, protocol.PART, (), audit=audit, codec=_Codec(log))
        # Message traffic has its own flow control; only these requests and malformed ones are charged.
        self.admit: Final = functools.partial(self.server.admit, is_charged=False)

    def submit(self, caller: requests.RpcCaller, request: protocol.DispatcherRequest) -> bool:
        """Whether it is one of these requests."""
        operation = self._operations.get(type(request))
        if operation is not None:
            self.server.submit(caller, operation)
        return operation is not None

    async def _list_queues(self, call: server.RpcCall, _: protocol.ListQueues) -> protocol.DispatcherReply:
        return protocol.DispatcherReply(queues=await self._admin.queue_rows(call.identity))

    async def _list_subscriptions(
        self, call: server.RpcCall, _: protocol.ListSubscriptions
    ) -> protocol.DispatcherReply:
        return protocol.DispatcherReply(subscriptions=await self._admin.subscription_rows(call.identity))

    async def _list_scheduled(
        self, call: server.RpcCall, request: protocol.ListScheduled
    ) -> protocol.DispatcherReply:
        return await self._scheduled.rows(call.identity, request)

    async def _browse(self, call: server.RpcCall, request: protocol.BrowseQueue) -> protocol.DispatcherReply:
        if not self._rights.may_browse(call.identity, request.queue):
            self._rights.check_queue(call.identity, "browse", request.queue)
        self._settings.check_exists(request.queue)
        self._log.check_is_here(request.queue)
        return await self._admin.browse(request, call.identity)

    async def _purge(self, call: server.RpcCall, request: protocol.PurgeQueue) -> protocol.DispatcherReply:
        self._check(call, request)
        return self._record_count(call, await self._admin.purge(request, call.identity))

    async def _move(self, call: server.RpcCall, request: protocol.MoveMessages) -> protocol.DispatcherReply:
        call.details["to"] = request.to or "original destinations"
        self._check(call, request)
        return self._record_count(call, await self._admin.move(request, call.identity))

    def _check(self, call: server.RpcCall, request: protocol.PurgeQueue | protocol.MoveMessages) -> None:
        call.target = f"queue:{request.queue}"
        if request.selector:
            call.details["selector"] = request.selector
        self._rights.check_queue(call.identity, "admin", request.queue)
        self._log.check_is_here(request.queue)
        if request.epoch not in (0, self._log.epoch):
            raise errors.StaleEpoch(
                "another dispatcher received the request before",
                epoch=request.epoch,
                current=self._log.epoch,
            )

    def _record_count(
        self, call: server.RpcCall, reply: protocol.DispatcherReply
    ) -> protocol.DispatcherReply:
        call.details["messages"] = f"{reply.count}"
        return reply
