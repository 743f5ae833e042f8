"""A notifier: holds receivers, matches events with them, and delivers.

    members     the other notifiers, and what each holds
    grants      models and grants, which all notifiers have
    shards      the receivers it holds: leases, changes, snapshots
    router      events: admission, matching, delivery
    durable     events that are stored until they are acknowledged
    history     decisions, for replay

A notifier whose lease is in doubt (its connection is lost) decides nothing.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Iterable
from typing import Any

from muster.bus import api, leases
from muster.core import errors, lifecycle
from muster.core.telemetry import metrics
from muster.notify import authorities, protocol
from muster.notify import settings as settings_
from muster.notify.matcher import kernels_numpy, matcher
from muster.notify.notifier import decision_log, durable_events, event_router, grants, query_handler, state
from muster.notify.notifier.shards import members, shard_manager

ANSWERS_S = 1.0  # time for the last replies when the notifier stops


class Notifier(lifecycle.ServiceContext):
    def __init__(
        self,
        bus: api.Bus,
        settings: settings_.NotifySettings | None = None,
        *,
        root: str = "",
        domain: str = "",
        grant_lifetime_s: float | None = None,
        replicas: int = 1,
        measure: metrics.Metrics | None = None,
        kernels: Any = None,
    ) -> None:
        """``root``: the public key at which every chain of grants must end; without it, no grant is valid.

        ``grant_lifetime_s``: grants that are valid for longer are refused.
        """
        self.name = bus.identity
        self.known = authorities.AuthorityView(root=root, domain=domain, lifetime_s_max=grant_lifetime_s)
        self._selects_kernels = kernels is None  # use the fastest kernels once they are loaded
        self.engine = matcher.Matcher(kernels=kernels or kernels_numpy)
        self.common = state.NotifierState(
            bus,
            settings or settings_.NotifySettings(),
            self.known,
            self.engine,
            measure or metrics.Metrics(),
        )
        self.held = self.common.held
        self._replicas = replicas
        self.members = members.NotifierMembers(self.common, durable_events.OWING_MAX)
        self._history = decision_log.DecisionLog(self.common)
        self.grants = grants.GrantView(self.common, self.members, self._history)
        self.router = event_router.EventRouter(self.common, self.members, self.grants, self._history)
        self._durable = durable_events.DurableEvents(
            self.common, self.members, self.grants, self.router, self._history
        )
        self._shards = shard_manager.ShardManager(
            self.common, self.members, self.grants, self.router, self._durable, self._history
        )
        self._query_server = query_handler.query_server(self)
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
        await self.grants.start(bucket)
        await self.members.start()
        await self._durable.start(events, matches)
        await self.router.start(self._durable.store)
        await self._shards.start(receivers, self._leases)
        await self._query_server.start()
        loop = self.common.tasks.loop
        loop("heartbeat", self.members.beat)
        loop("grants", self.grants.keep)
        loop("placement", self._shards.place)
        loop("memory", self._shards.release_memory)
        loop("routing", self.router.admit_all)
        loop("durable events", self._durable.record_all)
        loop("redelivery", self._durable.redeliver)
        loop("decision log", self._history.keep)
        if self._selects_kernels:
            self.common.tasks.spawn("kernels", self._load_fast_kernels())
        state.events.info("notifier-started", notifier=self.name)

    async def _load_fast_kernels(self) -> None:
        """Load them in a thread after the start. Until then the slower kernels give the same results."""
        self.engine.use(await asyncio.to_thread(matcher.warm_up))

    async def stop(self) -> None:
        with contextlib.suppress(errors.MusterError):
            await self.members.publish_summary(leaving=True)
        await self.grants.close()
        await self._query_server.close()
        await self.common.close_subscriptions()
        await self.common.tasks.close()
        await self._shards.stop()
        self.router.close()
        await self.common.server.drain(ANSWERS_S)
        await self.common.server.close()
        if self._leases is not None:
            await self._leases.close()

    async def serving(self, shards: Iterable[protocol.Shard] = range(protocol.SHARDS)) -> None:
        """Returns when this notifier holds these shards."""
        await self._shards.serving(shards)
