"""A notifier: holds receivers, decides who gets an event, and sees to it that they do.

    members     who else is there, and what each holds
    believing   models and grants, which all notifiers know
    shards      the receivers it holds: gained, changed, kept
    deciding    events: admitted, matched, delivered
    durable     events that are kept until acknowledged
    history     what was decided, for replay

A notifier whose lease is in doubt (its connection is away) decides nothing.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Iterable
from typing import Any

from muster.bus import api, leases
from muster.core import errors
from muster.core.telemetry import metrics
from muster.notify import authorities, protocol
from muster.notify import settings as settings_
from muster.notify.matcher import kernels_numpy
from muster.notify.matcher import matcher as engines
from muster.notify.notifier import decision_log, durable_events, event_router, grants, query_handler
from muster.notify.notifier import state as common_
from muster.notify.notifier.shards import members
from muster.notify.notifier.shards import shard_manager as shards_

ANSWERS_S = 1.0  # for the last answers, when it stops


class Notifier:
    def __init__(
        self,
        bus: api.Bus,
        settings: settings_.NotifySettings | None = None,
        *,
        root: str = "",
        domain: str = "",
        replicas: int = 1,
        measure: metrics.Metrics | None = None,
        kernels: Any = None,
    ) -> None:
        """``root``: the public key that grants must lead to; without one, none is believed."""
        self.name = bus.identity
        self.known = authorities.AuthorityView(root=root, domain=domain)
        self._hurries = kernels is None  # to the fastest kernels, once they are loaded
        self.engine = engines.Matcher(kernels=kernels or kernels_numpy)
        self.common = common_.NotifierState(
            bus, settings or settings_.NotifySettings(), self.known, self.engine, measure or metrics.Metrics()
        )
        self.held = self.common.held
        self._replicas = replicas
        self.members = members.NotifierMembers(self.common, durable_events.OWING_MAX)
        self._history = decision_log.DecisionLog(self.common)
        self.beliefs = grants.GrantView(self.common, self.members, self._history)
        self.deciding = event_router.EventRouter(self.common, self.members, self.beliefs, self._history)
        self._durable = durable_events.DurableEvents(
            self.common, self.members, self.beliefs, self.deciding, self._history
        )
        self._shards = shards_.ShardManager(
            self.common, self.members, self.beliefs, self.deciding, self._durable, self._history
        )
        self._questions = query_handler.server_of(self)
        self._leases: leases.Leases | None = None

    @property
    def counts(self) -> collections.Counter[str]:
        return self.common.counts

    async def start(self) -> None:
        bus, settings = self.common.bus, self.common.settings
        streams = protocol.streams(max_bytes=settings.stream_bytes, replicas=self._replicas)
        receivers, events, matches, past = [await bus.stream(stream) for stream in streams]
        bucket = await bus.key_value(api.KeyValueSettings(protocol.BUCKET, replicas=self._replicas))
        self._leases = await leases.Leases.open(bus, ttl_s=settings.lease_s, replicas=self._replicas)
        await self._history.start(past)
        await self.beliefs.start(bucket)
        await self.members.start()
        await self._durable.start(events, matches)
        await self.deciding.start(self._durable.keep)
        await self._shards.start(receivers, self._leases)
        await self._questions.start()
        for work in (
            self.members.beat(),
            self.beliefs.keep(),
            self._shards.place(),
            self._shards.give_back(),
            self.deciding.admit_all(),
            self._durable.record_all(),
            self._durable.deliver_again(),
            self._history.keep(),
        ):
            self.common.spawn(work)
        if self._hurries:
            self.common.spawn(self._hasten())
        common_.events.info("notifier-started", notifier=self.name)

    async def _hasten(self) -> None:
        """In a thread, after the start: meanwhile the plain kernels decide the same, only slower."""
        self.engine.use(await asyncio.to_thread(engines.warm_up))

    async def stop(self) -> None:
        with contextlib.suppress(errors.MusterError):
            await self.members.say(leaving=True)
        await self.beliefs.close()
        await self._questions.close()
        await self.common.close_ears()
        await self.common.cancel_all()
        await self._shards.stop()
        self.deciding.close()
        await self.common.server.drain(ANSWERS_S)
        await self.common.server.close()
        if self._leases is not None:
            await self._leases.close()

    async def __aenter__(self) -> Notifier:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def serving(self, shards: Iterable[protocol.Shard] = range(protocol.SHARDS)) -> None:
        """Returns when this notifier holds these shards."""
        await self._shards.serving(shards)
