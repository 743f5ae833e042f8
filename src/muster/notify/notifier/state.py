"""State that the parts of a notifier share: connection, held shards, models and grants, counters."""

from __future__ import annotations

import asyncio
import collections
import itertools
import secrets

import numpy as np
import numpy.typing as npt

from muster.bus import api
from muster.bus.rpc import error_replies, requests, server
from muster.core import errors, messages
from muster.core.telemetry import log, metrics
from muster.notify import authorities, protocol
from muster.notify import settings as settings_
from muster.notify.matcher import matcher
from muster.notify.notifier.shards import shard as shards_shard
from muster.supervision import tasks

events = log.EventLog("notify")

PENDING_MAX = 100_000  # requests to the shards of one notifier; its queues bound those of one sender


class NotifierState:
    def __init__(
        self,
        bus: api.Bus,
        settings: settings_.NotifySettings,
        knows: authorities.AuthorityView,
        engine: matcher.Matcher,
        measure: metrics.Metrics,
    ) -> None:
        self.name = bus.identity
        self.bus = bus
        self.settings = settings
        self.known = knows
        self.engine = engine
        self.held: dict[protocol.Shard, shards_shard.Shard] = {}
        # Of stored records: the bus repeats those with an id if there is no acknowledgement.
        self.record_ids = map(f"{secrets.token_hex(8)}-{{:x}}".format, itertools.count())
        self.moved = asyncio.Event()  # members or shards changed
        self.counts: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()  # receipts without a verified sender
        self._counter = measure.counter("notify_events", "Events and changes by outcome.", ("outcome",))
        self.server = server.RpcServer(
            bus,
            protocol.PART,
            (),
            codec=NotifyCodec(),
            pending_max=PENDING_MAX,
            on_outcome=self._count_failure,
        )
        self.tasks = tasks.TaskSupervisor(f"notifier {self.name}")
        self._subscriptions: list[api.Subscription] = []

    def count(self, outcome: str, number: int = 1) -> None:
        self.counts[outcome] += number
        self._counter.add(number, outcome=outcome)

    def _count_failure(self, outcome: str) -> None:
        if outcome != "done":
            self.count(outcome)

    # -- tasks and subscriptions

    async def listen(self, subject: str, handler: api.Handler, *, group: str | None = None) -> None:
        self._subscriptions.append(await self.bus.subscribe(subject, handler=handler, group=group))

    async def serve(self, pattern: str, operation: server.RpcOperation) -> api.Subscription:
        """Serve the requests to one shard, for as long as this notifier holds it."""

        def received(message: api.Message) -> None:
            caller = requests.accept(message, pattern, self.server.refused, admit=self.server.admit)
            if caller is None:
                self.count("no-request")
            else:
                self.server.submit(caller, operation)

        return await self.bus.subscribe(pattern, handler=received)

    async def close_subscriptions(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()

    # -- shards

    def held_of(self, subject: str) -> shards_shard.Shard:
        """Return the shard of a message; `errors.Unavailable` if another notifier holds it."""
        held = self.held.get(int(subject.rpartition(".")[2]))
        if held is None or not held.lease.held:
            self.count("not-held")
            raise moving()
        return held

    def deciding(self) -> npt.NDArray[np.bool_]:
        """Return, by shard, whether this notifier may decide for it: not while its lease is in doubt."""
        deciding = np.zeros(protocol.SHARDS, np.bool_)
        for shard, held in self.held.items():
            deciding[shard] = held.lease.held
        return deciding


def moving() -> errors.Unavailable:
    return errors.Unavailable("this shard is moving between notifiers")


class NotifyCodec:
    """Replies as `protocol.NotifyReply`."""

    def result(self, value: protocol.NotifyReply) -> bytes:
        return messages.encode(value)

    def error(self, error: errors.MusterError) -> bytes:
        return messages.encode(protocol.NotifyReply(refused=((-1, error_replies.to_error_reply(error)),)))


def finish(
    waiting: asyncio.Future[protocol.NotifyReply], outcome: protocol.NotifyReply | errors.MusterError
) -> None:
    """Set the outcome of a request, unless its handler no longer waits for it."""
    if waiting.done():
        return
    if isinstance(outcome, errors.MusterError):
        waiting.set_exception(outcome)
    else:
        waiting.set_result(outcome)
