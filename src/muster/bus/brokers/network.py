"""Several brokers and what joins them.

Three kinds of joint, all the engine's own.  *Routes* make the members of a cluster one: a full mesh with
shared, replicated storage.  *Gateways* join clusters into a super-cluster.  *Leaf links* hang a broker, or a
cluster, on another: messages cross where there is interest, and each side keeps its own storage.
 What can change while the network runs: brokers join and leave a cluster (`Network.add`, `Network.remove`),
leaf links come and go (`Network.link`, `Network.unlink`), durable storage is added to a broker and taken away
from it (`Network.add_storage`, `Network.remove_storage`).  What cannot: single routes, and which clusters
form a super-cluster.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from muster.bus import wire
from muster.bus.brokers import broker, config, supervision, system, topology
from muster.core import errors

EVACUATE_TIMEOUT_S = 60.0
_TWO_OR_MORE = "in a cluster two brokers or more must have storage, and three if one may fail; or none"
# So long the engine keeps out a broker whose storage was removed.
REJOIN_S = 300.0


class Network:
    """``async with mesh(3, directory) as network: … network.urls`` — or `start` and `stop` by hand."""

    def __init__(
        self,
        settings: Iterable[config.BrokerConfig],
        *,
        leaves: Iterable[tuple[str, str]] = (),
        program: Path | None = None,
        supervise: supervision.Supervision | None = None,
        outlive_us: bool = False,
        system_credentials: wire.Credentials | None = None,
    ) -> None:
        """``leaves`` are leaf links, near end and far end, to be made at the start."""
        self.brokers: dict[str, broker.Broker] = {}
        self._outside_routes: dict[str, tuple[str, ...]] = {}
        self._storage_removed_at_s: dict[str, float] = {}
        self._leaves = tuple(leaves)
        self._program = program
        self._supervise = supervise
        self._outlive_us = outlive_us
        self._system_credentials = system_credentials
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

    # Life

    async def start(self, *, timeout_s: float = broker.START_TIMEOUT_S) -> None:
        """When this returns, every broker is healthy and joined to those it should be joined to, and the
        storage of every cluster has a leader."""
        brokers = list(self.brokers.values())
        for one in brokers:
            self._check_storage(one)
        try:
            await _together(one.reserve() for one in brokers)
            for one in brokers:
                one.config = self._wired(one.config)
            await _together(one.start(timeout_s=timeout_s) for one in brokers)
            await _together(self._ready(one, timeout_s) for one in brokers)
            for near, far in self._leaves:
                await self.link(near, far)
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

    # Members

    async def add(self, settings: config.BrokerConfig, *, timeout_s: float = broker.START_TIMEOUT_S) -> None:
        """Start one more broker: alone, or as a member of a cluster that is here already."""
        gateways = {one.config.gateway.name for one in self.brokers.values() if one.config.gateway}
        if gateways and settings.gateway is not None and settings.gateway.name not in gateways:
            raise errors.Refused(
                f"cluster {settings.gateway.name!r} cannot join a super-cluster that runs",
                hint=f"gateways are fixed by the engine; restart the network with it. There are: "
                f"{', '.join(sorted(gateways))}",
            )
        made = self._make(settings)
        try:
            await made.reserve()
            made.config = self._wired(made.config)
            await made.start(timeout_s=timeout_s)
            await self._rewire()
            await self._ready(made, timeout_s)
            await self._settled(self._sharing(made), timeout_s)
        except BaseException:
            del self.brokers[made.name]
            await made.stop(timeout_s=1.0)
            raise

    async def remove(self, name: str, *, drain_s: float = 0.0, force: bool = False) -> None:
        """Stop a broker for good. What it stores moves to the others first; see `remove_storage`."""
        leaving = self[name]
        for other in self.brokers.values():
            for remote in other.config.remotes:
                if remote.far == name:
                    await other.unlink(remote.id)
        if leaving.config.storage is not None and leaving.config.cluster is not None:
            await self.remove_storage(name, force=force)
        await leaving.stop(drain_s=drain_s)
        del self.brokers[name]
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
        """Take a leaf link away while both ends run."""
        for one in self.brokers.values():
            if any(remote.id == id for remote in one.config.remotes):
                return await one.unlink(id)
        if id.startswith(("route:", "gateway:")):
            raise errors.Refused(
                f"{id} cannot be taken away while the network runs",
                hint="routes and gateways are fixed by the engine: remove the broker, or restart the network",
            )
        raise errors.NotFound(f"no link {id!r} in this network", hint="`links` lists them")

    async def links(self) -> list[topology.LinkStatus]:
        """Every link of every kind, as it is now. A broker that does not answer has only links that are
        down."""
        found: dict[str, topology.LinkStatus] = {}
        for some in await asyncio.gather(*(self._links_of(one) for one in self.brokers.values())):
            for status in some:
                if status.up or status.id not in found:
                    found[status.id] = status
        return sorted(found.values(), key=lambda status: (status.kind.value, status.id))

    async def _links_of(self, one: broker.Broker) -> list[topology.LinkStatus]:
        try:
            found = await one.links()
            if one.config.cluster is not None:
                found += topology.of_routes(one.name, await one.ask("routez"))
            if one.config.gateway is not None:
                found += topology.of_gateways(one.name, await one.ask("gatewayz"))
        except errors.Unavailable:
            return topology.of_leaves(
                one.name, one.config.remotes, {remote.id: () for remote in one.config.remotes}, {}
            )
        return found

    # Durable storage

    async def add_storage(
        self, name: str, storage: config.Storage, *, timeout_s: float = broker.START_TIMEOUT_S
    ) -> None:
        """Give a broker durable storage, for new streams to be placed on. The network runs on; the broker
        itself is restarted, since the engine can start storage late but then does not know its own name."""
        one = self[name]
        if one.config.storage is not None:
            raise errors.AlreadyExists(f"broker {name} has durable storage already")
        since_s = time.monotonic() - self._storage_removed_at_s.get(name, -REJOIN_S)
        if since_s < REJOIN_S and one.config.cluster is not None:
            raise errors.Unavailable(
                f"broker {name} gave up its storage {since_s:.0f} s ago: its cluster keeps it out",
                retry_after_s=REJOIN_S - since_s,
                hint="the engine keeps out what was removed for five minutes; wait, or use another broker",
            )
        await one.restart(dataclasses.replace(one.config, storage=storage))
        await self._ready(one, timeout_s)
        await self._settled(self._sharing(one), timeout_s)

    async def remove_storage(
        self, name: str, *, force: bool = False, timeout_s: float = EVACUATE_TIMEOUT_S
    ) -> None:
        """Take durable storage away from a broker. The network runs on; the broker itself is restarted.

        What it stores moves to the other members of its cluster first. If too few remain for the replicas
        that the streams ask for, it is refused; with ``force`` it goes all the same, and what only it held is
        lost.
        """
        one = self[name]
        if one.config.storage is None:
            raise errors.NotFound(f"broker {name} has no durable storage")
        sharing = [other for other in self._sharing(one) if other is not one]
        if len(sharing) == 1:
            raise errors.Refused(
                f"broker {name} cannot give up its storage: {sharing[0].name} would be alone with it",
                hint=_TWO_OR_MORE,
            )
        # A stream lives in one cluster of a super-cluster.
        others = [other for other in sharing if cluster_of(other.config) == cluster_of(one.config)]
        needed = await _replicas_max(one)
        if not force:
            if len(others) < needed:
                raise errors.Refused(
                    f"broker {name} cannot give up its storage: some stream has {needed} replicas, and "
                    f"{len(others)} other brokers of its cluster have storage",
                    hint="add storage to another broker, ask for fewer replicas, or force it and lose data",
                )
            if needed:
                await self._evacuate(one, others, timeout_s)
        await one.restart(dataclasses.replace(one.config, storage=None))
        self._storage_removed_at_s[name] = time.monotonic()
        if sharing:
            await self._system(sharing, "$JS.API.SERVER.REMOVE", {"peer": name})
            await self._settled(sharing, broker.START_TIMEOUT_S)

    async def _evacuate(self, one: broker.Broker, others: Sequence[broker.Broker], timeout_s: float) -> None:
        assert one.binary is not None
        one.binary.require("storage evacuation")
        await self._system(others, "$JS.API.SERVER.EVACUATE", {"peer": one.name})

        async def empty() -> bool:
            return int((await one.ask("jsz"))["streams"]) == 0

        try:
            await broker.poll(empty, timeout_s=timeout_s)
        except TimeoutError:
            raise errors.TimedOut(
                f"broker {one.name} still held streams after {timeout_s:g} s",
                hint="it goes on emptying itself: ask again later",
            ) from None

    async def _settled(self, sharing: Sequence[broker.Broker], timeout_s: float) -> None:
        """Wait until these brokers, and no others, share a storage whose leader sees all of them."""
        names = {one.name for one in sharing}

        async def settled() -> bool:
            for one in sharing:
                group = (await one.ask("jsz")).get("meta_cluster") or {}
                if group.get("leader") == one.name:
                    current = {peer["name"] for peer in group.get("replicas") or () if peer.get("current")}
                    return group.get("cluster_size") == len(names) and current == names - {one.name}
            return False

        if len(names) > 1:
            try:
                await broker.poll(settled, timeout_s=timeout_s)
            except TimeoutError:
                raise errors.TimedOut(
                    f"the storage of {', '.join(sorted(names))} has not settled after {timeout_s:g} s",
                    hint="see that all of them run and reach each other",
                ) from None

    async def _system(self, through: Sequence[broker.Broker], subject: str, payload: dict[str, Any]) -> None:
        first = through[0].config
        access = system.Access(
            credentials=self._system_credentials, password=first.system_secret, tls=first.tls
        )
        await system.request([one.address for one in through], access, subject, payload)

    # Who is joined to whom

    def _make(self, settings: config.BrokerConfig) -> broker.Broker:
        if settings.name in self.brokers:
            raise errors.AlreadyExists(f"two brokers of one network are called {settings.name!r}")
        self._outside_routes[settings.name] = settings.cluster.routes if settings.cluster else ()
        made = self.brokers[settings.name] = broker.Broker(
            settings, program=self._program, supervise=self._supervise, outlive_us=self._outlive_us
        )
        return made

    def _wired(self, one: config.BrokerConfig) -> config.BrokerConfig:
        everybody = [other.config for other in self.brokers.values()]
        return with_gateways(with_routes(one, everybody, self._outside_routes[one.name]), everybody)

    async def _rewire(self) -> None:
        """Tell the running members of each cluster who belongs to it now. They know by hearsay; this is for
        their next restart."""
        for one in self.brokers.values():
            everybody = [other.config for other in self.brokers.values()]
            wired = with_routes(one.config, everybody, self._outside_routes[one.name])
            if wired != one.config and one.state is broker.State.RUNNING:
                await one.apply(wired)

    async def _ready(self, one: broker.Broker, timeout_s: float) -> None:
        running = [other for other in self.brokers.values() if other.state is broker.State.RUNNING]
        peers = {
            other.name
            for other in running
            if other is not one and cluster_of(other.config) == cluster_of(one.config)
        }
        clusters = {other.config.gateway.name for other in running if other.config.gateway}
        expected = peers | (clusters - {one.config.gateway.name} if one.config.gateway else set())

        async def missing() -> set[str]:
            return expected - {status.far for status in await self._links_of(one) if status.up}

        async def joined() -> bool:
            return not await missing()

        try:
            await broker.poll(joined, timeout_s=timeout_s)
        except TimeoutError:
            absent = ", ".join(sorted(await missing()))
            raise errors.TimedOut(
                f"broker {one.name} is not joined to {absent} after {timeout_s:g} s",
                hint="see that their ports can be reached, and that their certificates or secrets agree",
            ) from None
        await one.wait_healthy(timeout_s=timeout_s)

    def _sharing(self, one: broker.Broker) -> list[broker.Broker]:
        """The brokers that share one storage with this one, itself included."""
        sites = self._sites()
        return [
            other
            for other in self.brokers.values()
            if other.config.storage is not None and sites[other.name] == sites[one.name]
        ]

    def _check_storage(self, one: broker.Broker) -> None:
        """One broker alone cannot hold the storage of a cluster: the engine waits for a second for ever."""
        cluster, gateway = one.config.cluster, one.config.gateway
        outside = self._outside_routes[one.name] or (gateway is not None and gateway.remotes)
        if cluster is not None and self._sharing(one) == [one] and not outside:
            raise errors.InvalidInput(
                f"broker {one.name} is the only one of its cluster with storage", hint=_TWO_OR_MORE
            )

    def _sites(self) -> dict[str, str]:
        """What each broker is one with: all clusters with gateways are one site."""
        return {
            one.name: "the super-cluster" if one.config.gateway else cluster_of(one.config)
            for one in self.brokers.values()
        }

    def _leaf_ends(self) -> list[tuple[str, str, str | None]]:
        return [
            (one.name, remote.far, remote.account)
            for one in self.brokers.values()
            for remote in one.config.remotes
            if remote.far in self.brokers
        ]


def cluster_of(one: config.BrokerConfig) -> str:
    """The name of its cluster, or its own."""
    return f"cluster {one.cluster.name}" if one.cluster else one.name


def with_routes(
    one: config.BrokerConfig, everybody: Sequence[config.BrokerConfig], outside: tuple[str, ...] = ()
) -> config.BrokerConfig:
    """Routes to all others of its cluster among ``everybody``, and to those ``outside``. Pure."""
    if one.cluster is None:
        return one
    inside = (
        config.peer_url(config.reachable(other.host), other.cluster.port, one.cluster.secret)
        for other in everybody
        if other.cluster is not None and other.cluster.name == one.cluster.name and other.name != one.name
    )
    routes = tuple(dict.fromkeys((*outside, *inside)))
    if not routes and one.gateway is not None and one.storage is not None:
        # The engine lets a cluster of one store only if it has a route, be it to itself.
        routes = (config.peer_url(config.reachable(one.host), one.cluster.port, one.cluster.secret),)
    return dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, routes=routes))


def with_gateways(one: config.BrokerConfig, everybody: Sequence[config.BrokerConfig]) -> config.BrokerConfig:
    """The addresses of all gateways among ``everybody``, by cluster. Pure."""
    if one.gateway is None:
        return one
    remotes = dict(one.gateway.remotes)
    for other in everybody:
        if other.gateway is not None:
            address = config.peer_url(config.reachable(other.host), other.gateway.port, one.gateway.secret)
            known = remotes.get(other.gateway.name, ())
            remotes[other.gateway.name] = tuple(dict.fromkeys((*known, address)))
    return dataclasses.replace(one, gateway=dataclasses.replace(one.gateway, remotes=remotes))


# The usual shapes


def members(
    n: int, directory: Path, *, name: str = "muster", prefix: str = "broker", **settings: Any
) -> list[config.BrokerConfig]:
    """The brokers of a cluster, in folders of their own under ``directory``. One broker needs no cluster.

    Further ``settings`` are fields of `config.BrokerConfig`, the same for all.
    """
    if n < 1:
        raise errors.InvalidInput(f"a cluster of {n} brokers is none")
    cluster = config.Cluster(name=name) if n > 1 or "gateway" in settings else None
    names = [f"{prefix}-{index}" for index in range(1, n + 1)]
    return [
        config.BrokerConfig(name=one, directory=directory / one, cluster=cluster, **settings) for one in names
    ]


def mesh(
    n: int, directory: Path, *, name: str = "muster", prefix: str = "broker", **settings: Any
) -> Network:
    """A cluster of ``n`` brokers, each joined to all others."""
    return Network(members(n, directory, name=name, prefix=prefix, **settings))


def super_cluster(sizes: Mapping[str, int], directory: Path, **settings: Any) -> Network:
    """Clusters of these names and sizes, joined by gateways."""
    return Network(
        one
        for name, n in sizes.items()
        for one in members(
            n, directory, name=name, prefix=name, gateway=config.Gateway(name=name), **settings
        )
    )


def leaf_tree(parents: Mapping[str, str | None], directory: Path, **settings: Any) -> Network:
    """Single brokers, each hanging on its parent by a leaf link; chains and stars are trees too.

    Storage, where ``settings`` give it, is each broker's own, in a domain of its name.
    """
    storage = settings.pop("storage", config.Storage())
    return Network(
        [
            config.BrokerConfig(
                name=name,
                directory=directory / name,
                storage=None if storage is None else dataclasses.replace(storage, domain=name),
                **settings,
            )
            for name in parents
        ],
        leaves=[(child, parent) for child, parent in parents.items() if parent is not None],
    )


async def _replicas_max(one: broker.Broker) -> int:
    """The most replicas that a stream on this broker asks for; 0 if there are none."""
    page = await one.ask("jsz?accounts=true&streams=true&config=true")
    return max(
        (
            int((stream.get("config") or {}).get("num_replicas", 1))
            for account in page.get("account_details") or ()
            for stream in account.get("stream_detail") or ()
        ),
        default=0,
    )


async def _together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once; the first failure ends the others and is raised as itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in coroutines:
                group.create_task(one)
    except* errors.MusterError as failed:
        raise _first(failed) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
