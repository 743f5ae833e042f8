"""Several brokers and what joins them.

There are three kinds of links, all of NATS. *Routes* connect the members of a cluster: a full mesh with
shared, replicated storage. *Gateways* connect clusters to a super-cluster. *Leaf links* connect a broker or a
cluster to another one: messages cross where there is interest, and each side has its own storage.

At run time, brokers can join and leave a cluster (`BrokerNetwork.add`, `BrokerNetwork.remove`), leaf links
can be added and removed (`BrokerNetwork.link`, `BrokerNetwork.unlink`), and the durable storage of a broker
can be removed (`BrokerNetwork.remove_storage`). Single routes and the set of clusters of a super-cluster
cannot be changed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from muster.bus.brokers import broker, config, control, files, storage, system_account, topology
from muster.bus.client import credential_source
from muster.core import backoff, errors

EVACUATE_TIMEOUT_S = 60.0
DRAIN_S = 5.0  # before a restart: leadership is transferred, and clients move to other brokers


class BrokerNetwork:
    """``async with mesh(3, directory) as network: … network.urls``, or call `start` and `stop`."""

    def __init__(
        self,
        settings: Iterable[config.BrokerConfig],
        *,
        leaves: Iterable[tuple[str, str]] = (),
        program: Path | None = None,
        supervise: backoff.BackoffPolicy | None = None,
        outlive_s: float = 0.0,
        system_credentials: credential_source.CredentialSource | None = None,
        trust: Callable[[], config.OperatorTrust] | None = None,
    ) -> None:
        """``leaves`` are leaf links, near end and far end, to be made at the start. ``outlive_s`` and
        ``trust``: see `broker.Broker`."""
        self.brokers: dict[str, broker.Broker] = {}
        self._outside_routes: dict[str, tuple[str, ...]] = {}
        self._leaves = tuple(leaves)
        self._program = program
        self._supervise = supervise
        self._outlive_s = outlive_s
        self._system_credentials = system_credentials
        self._trust = trust
        for broker_config in settings:
            self._make(broker_config)

    @property
    def urls(self) -> list[str]:
        return [member.url for member in self.brokers.values()]

    def __getitem__(self, name: str) -> broker.Broker:
        try:
            return self.brokers[name]
        except KeyError:
            raise errors.NotFound(
                f"no broker {name!r} in this network", hint=f"there are: {', '.join(self.brokers)}"
            ) from None

    # Life

    async def start(self, *, timeout_s: float = broker.START_TIMEOUT_S) -> None:
        """When this returns, every broker is healthy and has all its links, and the storage of every cluster
        has a leader."""
        brokers = list(self.brokers.values())
        for member in brokers:
            self._check_storage(member)
        try:
            await _together(member.find_orphan() for member in brokers)
            await _together(member.reserve() for member in brokers)
            for member in brokers:
                member.config = self._wired(member.config)
            await _together(member.start(timeout_s=timeout_s) for member in brokers)
            await _together(self._ready(member, timeout_s) for member in brokers)
            for near, far in self._leaves:
                await self.link(near, far)
        except BaseException:
            await self.stop(timeout_s=1.0)
            raise

    async def stop(self, *, drain_s: float = 0.0, timeout_s: float = broker.STOP_TIMEOUT_S) -> None:
        await asyncio.gather(
            *(member.stop(drain_s=drain_s, timeout_s=timeout_s) for member in self.brokers.values())
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # Members

    async def add(self, settings: config.BrokerConfig, *, timeout_s: float = broker.START_TIMEOUT_S) -> None:
        """Start one more broker: alone, or as a member of a cluster that is here already."""
        gateways = {member.config.gateway.name for member in self.brokers.values() if member.config.gateway}
        if gateways and settings.gateway is not None and settings.gateway.name not in gateways:
            raise errors.Refused(
                f"cluster {settings.gateway.name!r} cannot join a super-cluster that runs",
                hint=f"gateways are fixed by the engine; restart the network with it. There are: "
                f"{', '.join(sorted(gateways))}",
            )
        made = self._make(settings)
        try:
            await made.find_orphan()
            await made.reserve()
            made.config = self._wired(made.config)
            await made.start(timeout_s=timeout_s)
            await self._rewire()
            await self._ready(made, timeout_s)
            await storage.wait_until_settled(self._sharing(made), timeout_s)
        except BaseException:
            del self.brokers[made.name]
            await made.stop(timeout_s=1.0)
            raise

    async def remove(self, name: str, *, drain_s: float = 0.0, force: bool = False) -> None:
        """Stop a broker permanently. Its stored data moves to the others first; see `remove_storage`."""
        leaving = self[name]
        if leaving.config.storage is not None and leaving.config.cluster is not None:
            await self.remove_storage(name, force=force)  # first, because it may be refused
        for other in list(self.brokers.values()):  # a copy: others may come and go meanwhile
            for remote in other.config.remotes:
                if remote.far == name:
                    await other.unlink(remote.id)
        await leaving.stop(drain_s=drain_s)
        self.brokers.pop(name, None)  # gone already after a second request
        await self._rewire()

    # Leaf links

    async def link(
        self,
        near: str,
        far: str,
        *,
        account: str | None = None,
        credentials_file: Path | None = None,
        timeout_s: float | None = broker.LINK_TIMEOUT_S,
    ) -> str:
        """Hang ``near`` on ``far`` while both run, and return the link's id."""
        here, there = self[near], self[far]
        if there.leaf_url is None:
            raise errors.Refused(
                f"broker {far} does not listen for leaf links", hint="start it with a `leaf` listener"
            )
        topology.check_new(near, far, account, self._sites(), self._leaf_ends())
        id = topology.leaf_id(near, far) + (f":{account}" if account else "")
        remote = config.LeafRemote(
            id=id, urls=(there.leaf_url,), far=far, account=account, credentials_file=credentials_file
        )
        await here.link(remote, timeout_s=timeout_s)
        return id

    async def unlink(self, id: str) -> None:
        """Remove a leaf link while both ends run."""
        for member in self.brokers.values():
            if any(remote.id == id for remote in member.config.remotes):
                return await member.unlink(id)
        if id.startswith(("route:", "gateway:")):
            raise errors.Refused(
                f"{id} cannot be removed while the network runs",
                hint="routes and gateways are fixed by the engine: remove the broker, or restart the network",
            )
        there = [remote.id for member in self.brokers.values() for remote in member.config.remotes]
        raise errors.NotFound(
            f"no link {id!r} in this network",
            hint=f"there is: {', '.join(there)}" if there else "there are no leaf links",
        )

    async def reload_adopted(self) -> None:
        """Have the brokers that were adopted read their files, when the links of the settings are made.
        Their certificates may have been renewed since they started, and they may have leaf links that a
        former process made at run time."""
        for member in list(self.brokers.values()):
            if not member.adopted:
                continue
            if member.config.tls or not await asyncio.to_thread(files.is_written, member.config):
                await member.reload()

    async def links(self) -> list[control.LinkRow]:
        """The current state of all links. A broker that does not respond has only links that are down."""
        statuses = {
            status.id: status for status in topology.due([member.config for member in self.brokers.values()])
        }
        for member_links in await asyncio.gather(
            *(self._links_of(member) for member in self.brokers.values())
        ):
            for status in member_links:
                if status.up or status.id not in statuses:
                    statuses[status.id] = status
        return sorted(statuses.values(), key=lambda status: (status.kind, status.id))

    async def _links_of(self, member: broker.Broker) -> list[control.LinkRow]:
        try:
            statuses = await member.links()
            if member.config.cluster is not None:
                statuses += topology.route_links(member.name, await member.monitoring_page("routez"))
            if member.config.gateway is not None:
                statuses += topology.gateway_links(member.name, await member.monitoring_page("gatewayz"))
        except errors.Unavailable:
            return []
        return statuses

    # Durable storage

    async def remove_storage(
        self, name: str, *, force: bool = False, timeout_s: float = EVACUATE_TIMEOUT_S
    ) -> None:
        """Remove durable storage from a broker. The network continues to run; the broker is restarted.

        Its stored data moves to the other members of its cluster first. If too few remain for the replicas of
        the streams, or if it does not run, the request is rejected; with ``force`` the storage is removed
        anyway, and data that only this broker had is lost.
        """
        member = self[name]
        if member.config.storage is None:
            raise errors.NotFound(f"broker {name} has no durable storage")
        sharing = [other for other in self._sharing(member) if other is not member]
        if len(sharing) == 1:
            raise errors.Refused(
                f"the storage of broker {name} cannot be removed: {sharing[0].name} would be the only "
                "one left with storage",
                hint=storage.TWO_OR_MORE,
            )
        if not force:
            await self._empty(member, sharing, timeout_s)
        without = dataclasses.replace(member.config, storage=None)
        if member.state in (broker.BrokerState.RUNNING, broker.BrokerState.RESTARTING):
            await member.restart(without, drain_s=DRAIN_S)
        member.config = without
        if sharing:
            await storage.remove_peer(name, sharing, self._access(member))

    async def storage_group(self) -> storage.StorageGroup:
        """The brokers that share the storage of this network, also those of other machines."""
        member = next(iter(self.brokers.values()))
        return await storage.group_of([member.address], self._access(member))

    async def strike(self, name: str) -> None:
        """Remove a broker that is lost, outside of this network, from those that share the storage. Its
        replicas move to others."""
        member = next(iter(self.brokers.values()))
        await system_account.request(
            [member.address], self._access(member), "$JS.API.SERVER.REMOVE", {"peer": name}
        )

    async def _empty(self, member: broker.Broker, sharing: Sequence[broker.Broker], timeout_s: float) -> None:
        if member.state is not broker.BrokerState.RUNNING:
            raise errors.Refused(
                f"broker {member.name} does not run, so its stored data cannot move",
                hint="start it first, or force it and lose what only it held",
            )
        # A stream lives in one cluster of a super-cluster.
        cluster = topology.cluster_of(member.config)
        others = [other for other in sharing if topology.cluster_of(other.config) == cluster]
        needed = await storage.replicas_max(member)
        if len(others) < needed:
            raise errors.Refused(
                f"the storage of broker {member.name} cannot be removed: a stream has {needed} "
                f"replicas, and {len(others)} other brokers of its cluster have storage",
                hint=(
                    "add storage to another broker, reduce the number of replicas, or force it and lose data"
                ),
            )
        if needed:
            await storage.evacuate(member, others, self._access(member), timeout_s)

    def _access(self, member: broker.Broker) -> system_account.SystemAccess:
        return system_account.SystemAccess(
            credentials=self._system_credentials, password=member.config.system_secret, tls=member.config.tls
        )

    # Links

    def _make(self, settings: config.BrokerConfig) -> broker.Broker:
        if settings.name in self.brokers:
            raise errors.AlreadyExists(f"two brokers of one network are called {settings.name!r}")
        self._outside_routes[settings.name] = settings.cluster.routes if settings.cluster else ()
        made = self.brokers[settings.name] = broker.Broker(
            settings,
            program=self._program,
            supervise=self._supervise,
            outlive_s=self._outlive_s,
            trust=self._trust,
        )
        return made

    def _wired(self, broker_config: config.BrokerConfig) -> config.BrokerConfig:
        configs = [other.config for other in self.brokers.values()]
        return topology.with_gateways(
            topology.with_routes(broker_config, configs, self._outside_routes[broker_config.name]),
            configs,
        )

    async def reconfigure(self, settings: config.BrokerConfig, *, drain_s: float = DRAIN_S) -> None:
        """Other routes to brokers outside, at once; with or without storage, by a restart."""
        member = self[settings.name]
        assert settings.cluster is not None
        self._outside_routes[settings.name] = settings.cluster.routes
        changed = self._wired(
            dataclasses.replace(
                member.config,
                storage=settings.storage,
                cluster=dataclasses.replace(
                    settings.cluster, port=member.config.cluster.port if member.config.cluster else 0
                ),
            )
        )
        if (changed.storage is None) != (member.config.storage is None):
            await member.restart(changed, drain_s=drain_s)
        elif changed != member.config:
            await member.apply(changed)

    async def _rewire(self) -> None:
        """Write the current members of each cluster to the configuration of the running ones. They know new
        members already; this is for their next restart."""
        for member in list(self.brokers.values()):
            configs = [other.config for other in self.brokers.values()]
            wired = topology.with_routes(member.config, configs, self._outside_routes[member.name])
            if wired != member.config and member.state is broker.BrokerState.RUNNING:
                await member.apply(wired)

    async def _ready(self, member: broker.Broker, timeout_s: float) -> None:
        running = [other for other in self.brokers.values() if other.state is broker.BrokerState.RUNNING]
        peers = {
            other.name
            for other in running
            if other is not member and topology.cluster_of(other.config) == topology.cluster_of(member.config)
        }
        clusters = {other.config.gateway.name for other in running if other.config.gateway}
        expected = peers | (clusters - {member.config.gateway.name} if member.config.gateway else set())

        async def missing() -> set[str]:
            return expected - {status.far for status in await self._links_of(member) if status.up}

        async def joined() -> bool:
            return not await missing()

        try:
            await broker.poll_until(joined, timeout_s=timeout_s)
        except TimeoutError:
            absent = ", ".join(sorted(await missing()))
            raise errors.TimedOut(
                f"broker {member.name} is not joined to {absent} after {timeout_s:g} s",
                hint="see that their ports can be reached, and that their certificates or secrets agree",
            ) from None
        await member.wait_healthy(timeout_s=timeout_s)

    def _sharing(self, member: broker.Broker) -> list[broker.Broker]:
        """The brokers that share one storage with this one, itself included."""
        sites = self._sites()
        return [
            other
            for other in self.brokers.values()
            if other.config.storage is not None and sites[other.name] == sites[member.name]
        ]

    def _check_storage(self, member: broker.Broker) -> None:
        """A single broker cannot have the storage of a cluster: NATS waits for a second one without limit."""
        cluster, gateway = member.config.cluster, member.config.gateway
        outside = self._outside_routes[member.name] or (gateway is not None and gateway.remotes)
        founded = cluster is not None and cluster.founders
        if cluster is not None and self._sharing(member) == [member] and not outside and not founded:
            raise errors.InvalidInput(
                f"broker {member.name} is the only one of its cluster with storage", hint=storage.TWO_OR_MORE
            )

    def _sites(self) -> dict[str, str]:
        """The site of each broker: all clusters with gateways are one site."""
        return {
            member.name: "the super-cluster" if member.config.gateway else topology.cluster_of(member.config)
            for member in self.brokers.values()
        }

    def _leaf_ends(self) -> list[tuple[str, str, str | None]]:
        return [
            (member.name, remote.far, remote.account)
            for member in self.brokers.values()
            for remote in member.config.remotes
            if remote.far in self.brokers
        ]


# The usual shapes


def members(
    n: int, directory: Path, *, name: str = "muster", prefix: str = "broker", **settings: Any
) -> list[config.BrokerConfig]:
    """The brokers of a cluster, in folders of their own under ``directory``. One broker needs no cluster.

    Further ``settings`` are fields of `config.BrokerConfig`, the same for all.
    """
    if n < 1:
        raise errors.InvalidInput(f"a cluster of {n} brokers is none")
    cluster = config.BrokerCluster(name=name) if n > 1 or "gateway" in settings else None
    names = [f"{prefix}-{index}" for index in range(1, n + 1)]
    return [
        config.BrokerConfig(name=member, directory=directory / member, cluster=cluster, **settings)
        for member in names
    ]


def mesh(
    n: int, directory: Path, *, name: str = "muster", prefix: str = "broker", **settings: Any
) -> BrokerNetwork:
    """A cluster of ``n`` brokers, each joined to all others."""
    return BrokerNetwork(members(n, directory, name=name, prefix=prefix, **settings))


async def _together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once; the first failure ends the others and is raised as itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as failed:  # not except*: before 3.11.4 it wraps exceptions raised inside
        ours = failed.subgroup(errors.MusterError)
        if ours is None:
            raise
        raise _first(ours) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
