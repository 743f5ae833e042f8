"""Several brokers and what joins them.
 Three kinds of joint, all the engine's own.  *Routes* make the members of a cluster one: a full mesh with
shared, replicated storage.  *Gateways* join clusters into a super-cluster.  *Leaf links* hang a broker, or a
cluster, on another: messages cross where there is interest, and each side keeps its own storage.

Routes and gateways follow from who is in the network, and are fixed while it runs, except that a cluster may
gain and lose members.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from muster.bus.brokers import broker, config, supervision
from muster.core import errors


class Network:
    """``async with mesh(3, directory) as network: … network.urls`` — or `start` and `stop` by hand."""

    def __init__(
        self,
        settings: Iterable[config.BrokerConfig],
        *,
        program: Path | None = None,
        supervise: supervision.Supervision | None = None,
        outlive_us: bool = False,
    ) -> None:
        self.brokers: dict[str, broker.Broker] = {}
        self._program = program
        self._supervise = supervise
        self._outlive_us = outlive_us
        for one in settings:
            self._make(one)

    @property
    def urls(self) -> list[str]:
        return [one.url for one in self.brokers.values()]

    def __getitem__(self, name: str) -> broker.Broker:
        try:
            return self.brokers[name]
        except KeyError:
            raise errors.NotFound(
                f"no broker {name!r} in this network", hint=f"there are: {', '.join(self.brokers)}"
            ) from None

    async def start(self, *, timeout_s: float = broker.START_TIMEOUT_S) -> None:
        """When this returns, every broker is healthy, and the storage of every cluster has a leader."""
        members = list(self.brokers.values())
        try:
            async with asyncio.timeout(timeout_s):
                await _together(one.reserve() for one in members)
                for one, wired in zip(members, wire([one.config for one in members]), strict=True):
                    one.config = wired
                await _together(one.start(timeout_s=timeout_s) for one in members)
                await _together(one.wait_healthy(timeout_s=timeout_s) for one in members)
        except BaseException:
            await self.stop(timeout_s=1.0)
            raise

    async def stop(self, *, drain_s: float = 0.0, timeout_s: float = broker.STOP_TIMEOUT_S) -> None:
        await asyncio.gather(
            *(one.stop(drain_s=drain_s, timeout_s=timeout_s) for one in self.brokers.values())
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _make(self, settings: config.BrokerConfig) -> broker.Broker:
        if settings.name in self.brokers:
            raise errors.AlreadyExists(f"two brokers of one network are called {settings.name!r}")
        made = self.brokers[settings.name] = broker.Broker(
            settings, program=self._program, supervise=self._supervise, outlive_us=self._outlive_us
        )
        return made


def wire(settings: Sequence[config.BrokerConfig]) -> list[config.BrokerConfig]:
    """Give every member of a cluster its routes to the others, and every gateway its remotes. Pure."""
    return [_with_gateways(_with_routes(one, settings), settings) for one in settings]


def _with_routes(one: config.BrokerConfig, settings: Sequence[config.BrokerConfig]) -> config.BrokerConfig:
    if one.cluster is None:
        return one
    others = tuple(
        config.peer_url(config.reachable(other.host), other.cluster.port, one.cluster.secret)
        for other in settings
        if other is not one and other.cluster is not None and other.cluster.name == one.cluster.name
    )
    routes = tuple(dict.fromkeys((*one.cluster.routes, *others)))
    return dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, routes=routes))


def _with_gateways(one: config.BrokerConfig, settings: Sequence[config.BrokerConfig]) -> config.BrokerConfig:
    if one.gateway is None:
        return one
    remotes = dict(one.gateway.remotes)
    for other in settings:
        if other.gateway is not None:
            address = config.peer_url(config.reachable(other.host), other.gateway.port, one.gateway.secret)
            known = remotes.get(other.gateway.name, ())
            remotes[other.gateway.name] = tuple(dict.fromkeys((*known, address)))
    return dataclasses.replace(one, gateway=dataclasses.replace(one.gateway, remotes=remotes))


def mesh(
    n: int, directory: Path, *, name: str = "muster", prefix: str = "broker", **settings: Any
) -> Network:
    """A cluster of ``n`` brokers, each joined to all others, in folders of their own under ``directory``.

    Further ``settings`` are fields of `config.BrokerConfig`, the same for all.
    """
    return Network(members(n, directory, name=name, prefix=prefix, **settings))


def members(
    n: int, directory: Path, *, name: str = "muster", prefix: str = "broker", **settings: Any
) -> list[config.BrokerConfig]:
    """The members of a cluster, to be put into a `Network`. One broker needs no cluster."""
    if n < 1:
        raise errors.InvalidInput(f"a cluster of {n} brokers is none")
    names = [f"{prefix}-{index}" for index in range(1, n + 1)]
    cluster = config.Cluster(name=name) if n > 1 else None
    return [
        config.BrokerConfig(name=one, directory=directory / one, cluster=cluster, **settings) for one in names
    ]


async def _together(awaitables: Iterable[Any]) -> None:
    """All at once; the first failure ends the others and is raised as itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in awaitables:
                group.create_task(one)
    except* errors.MusterError as failed:
        raise _first(failed) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
