"""A broker (``nats-server``) as a resource: its configuration and its leaf links.

A link is named by the broker at its far end: another resource of the same agent, or the URL of a leaf
listener elsewhere. Links change while the broker runs; any other change restarts it on the same ports.

The first broker of a ring has a reserve link (`muster.manage.topologies`). It watches the other links of the
ring and closes the ring when one of them is down. If that link recovers, the brokers detect the loop and keep
it down: it is the reserve from then on.

A broker admits only the identities of the domain, so an agent without the necessary documents cannot run
brokers. When the documents change (a revocation), the broker reloads them.

A broker ends with its agent, and its manager starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
from typing import Annotated, Any

import msgspec

from muster.bus.brokers import broker, config
from muster.core import backoff, errors, health
from muster.core.settings import sections
from muster.manage import protocol
from muster.manage.adapters import base

doc = sections.field_doc

WATCH_S = 0.25
LINK_TIMEOUT_S = 5.0
RESERVE = "reserve"
TRUST_S = 2.0  # between two looks for changes of the domain's documents, such as revocations

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class BrokerResourceConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A broker of the domain, linked to others. `topologies` writes these resources for complete networks."""

    host: Annotated[str, doc("Address it listens on.")] = "127.0.0.1"
    port: Annotated[Port, doc("Port; 0: a free port.")] = 0
    storage: Annotated[bool, doc("Whether it stores streams.")] = False
    links: Annotated[tuple[str, ...], doc("Broker resources it links to.")] = ()
    reserve: Annotated[str | None, doc("The broker it links to when a link of `ring` fails.")] = None
    ring: Annotated[tuple[str, ...], doc("All brokers of the ring, in order.")] = ()
    connections_max: Annotated[int, doc("Maximum number of connections.", ge=1)] = 65_536


class BrokerAdapter(base.Adapter):
    type_name = "broker"
    config_type = BrokerResourceConfig
    can_be_renamed = False  # it runs in its folder, and other brokers refer to it by name
    _config: BrokerResourceConfig | None

    def __init__(self, context: base.AdapterContext) -> None:
        super().__init__(context)
        self._trusting: asyncio.Task[None] | None = None
        self._access: base.BrokerAccess | None = None
        self._ending: asyncio.Task[None] | None = None
        self.broker: broker.Broker | None = None

    async def create(self, config: BrokerResourceConfig, *, start: bool) -> None:
        self._config = config
        if start:
            await self.do_start()

    async def put(self, config: BrokerResourceConfig) -> None:
        before, self._config = self._config, config
        if self.broker is None or before is None:
            return
        links = {"links": config.links, "reserve": config.reserve, "ring": config.ring}
        if msgspec.structs.replace(before, **links) != config:
            await self.do_stop()
            await self.do_start()
            return
        for name in set(before.links) - set(config.links):
            await self.broker.unlink(name)
        await self._link_all()
        self._restart_watch()
        self._report_state()

    async def delete(self) -> None:
        await self.do_stop()
        self._config = None

    async def observe(self) -> protocol.ObservedState:
        return self._observed()

    async def resume(self, config: BrokerResourceConfig) -> None:
        self._config = config

    async def close(self) -> None:
        await self.do_stop()

    # Operations

    async def do_start(self) -> None:
        if self._config is None:
            raise errors.NotFound(f"{self.context.name} does not exist")
        runs = self.broker is not None and self.broker.state is broker.BrokerState.RUNNING
        if runs and self._ending is None:
            return
        await self.do_stop()
        self._access = access = await self._broker_access()
        made = broker.Broker(
            self._settings(self._config, access), supervise=backoff.NO_RESTART, listener=self._changed
        )
        self.broker = made
        try:
            await made.start()
            self._store_ports(made)
            await self._link_all()
        except BaseException:
            await self.do_stop()
            raise
        self._restart_watch()
        self._trusting = self.tasks.loop("trust", self._refresh_trust_forever)
        self._report_state()

    async def do_stop(self) -> None:
        ending = [task for task in (self._watching, self._trusting) if task is not None]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._watching = self._trusting = None
        await self._end_broker(drain_s=0.0)

    async def do_drain(self) -> None:
        await self._end_broker(drain_s=5.0)
        await self.do_stop()

    async def _end_broker(self, *, drain_s: float) -> None:
        """Stop the broker. This continues if the operation is cancelled; the next operation waits for it."""
        if self._ending is None and self.broker is not None:
            self._ending = asyncio.create_task(self._stop_broker(self.broker, drain_s))
        if self._ending is not None:
            await asyncio.shield(self._ending)

    async def _stop_broker(self, made: broker.Broker, drain_s: float) -> None:
        try:
            await made.stop(drain_s=drain_s)
        finally:
            self.broker = self._ending = None
            if self._config is not None:
                self._report_state()

    async def do_links(self) -> list[dict[str, Any]]:
        """The current leaf links."""
        if self.broker is None:
            return []
        return [{"id": link.id, "far": link.far, "up": link.up} for link in await self.broker.links()]

    async def do_link(self, far: str) -> None:
        await self._link(far, far)

    async def do_unlink(self, far: str) -> None:
        if self.broker is not None:
            await self.broker.unlink(far)

    async def do_logs(self) -> str:
        return "\n".join(await self.broker.log_tail()) if self.broker is not None else ""

    # The broker

    async def _broker_access(self) -> base.BrokerAccess:
        if self.context.broker_access is None:
            raise errors.Refused(
                f"{self.context.name}: this agent may not run brokers, because they would admit every client",
                hint="use the agent on the domain's own machine: it has the domain's documents",
            )
        return await self.context.broker_access()

    async def _refresh_trust_forever(self) -> None:
        while True:
            await asyncio.sleep(TRUST_S)
            with contextlib.suppress(errors.MusterError):
                await self.refresh_trust()

    async def refresh_trust(self) -> None:
        access = await self._broker_access()
        if self.broker is not None and access.trust != self.broker.config.trust:
            await self.broker.apply(dataclasses.replace(self.broker.config, trust=access.trust))

    def _settings(self, settings: BrokerResourceConfig, access: base.BrokerAccess) -> config.BrokerConfig:
        ports = self.context.runtime.get("ports", {})
        return config.BrokerConfig(
            name=self.context.name,
            directory=(self.context.folder or pathlib.Path.cwd() / self.context.name) / "broker",
            host=settings.host,
            port=settings.port or ports.get("port", 0),
            monitor_port=ports.get("monitor_port", 0),
            leaf=config.BrokerListener(port=ports.get("leaf", 0)),
            storage=config.BrokerStorage(domain=self.context.name) if settings.storage else None,
            connections_max=settings.connections_max,
            trust=access.trust,
        )

    def _store_ports(self, made: broker.Broker) -> None:
        """Store the ports: other brokers have links to them."""
        leaf = made.config.leaf
        self.context.runtime["ports"] = {
            "port": made.config.port,
            "monitor_port": made.config.monitor_port,
            "leaf": leaf.port if leaf else 0,
        }

    async def _link_all(self) -> None:
        assert self._config is not None
        assert self.broker is not None
        known = {remote.id for remote in self.broker.config.remotes}
        missing = [far for far in self._config.links if far not in known]
        if missing:
            remotes = tuple(self._remote(far, far) for far in missing)
            await self.broker.apply(
                dataclasses.replace(self.broker.config, remotes=(*self.broker.config.remotes, *remotes))
            )
            await self._until_up(set(missing))

    async def _until_up(self, ids: set[str]) -> None:
        made = self.broker
        assert made is not None

        async def up() -> bool:
            return ids <= {link.id for link in await made.links() if link.up}

        try:
            await broker.poll_until(up, timeout_s=LINK_TIMEOUT_S)
        except TimeoutError:
            raise errors.Unavailable(
                f"{self.context.name}: links to {', '.join(sorted(ids))} not up after {LINK_TIMEOUT_S:g} s"
            ) from None

    async def _link(self, id: str, far: str) -> None:
        if self.broker is None:
            raise errors.NotFound(f"{self.context.name} is not running")
        if id not in {remote.id for remote in self.broker.config.remotes}:
            await self.broker.link(self._remote(id, far))

    def _remote(self, id: str, far: str) -> config.LeafRemote:
        assert self._access is not None
        account, creds = self._access.account, self._access.link_credentials
        if "://" in far:
            return config.LeafRemote(id=id, urls=(far,), account=account, credentials_file=creds)
        other = self.context.sibling(far)
        url = other.broker.leaf_url if isinstance(other, BrokerAdapter) and other.broker is not None else None
        if url is None:
            raise errors.Unavailable(
                f"{self.context.name}: the broker {far!r} is not running on this machine"
            )
        return config.LeafRemote(id=id, urls=(url,), far=far, account=account, credentials_file=creds)

    # Reserve link of a ring

    def _restart_watch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._config is not None and self._config.reserve is not None:
            self._watching = self.tasks.loop("ring", self._watch_ring)

    async def _watch_ring(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            with contextlib.suppress(errors.MusterError):
                await self._repair_ring()

    async def _repair_ring(self) -> None:
        assert self._config is not None
        if self.broker is None or self._config.reserve is None:
            return
        closed = any(remote.id == RESERVE for remote in self.broker.config.remotes)
        connected = await self._chain_is_connected()
        self.context.runtime["armed"] = connected or self.context.runtime.get("armed", False)
        if not connected and not closed and self.context.runtime["armed"]:
            await self._link(RESERVE, self._config.reserve)
            self._report_state()
        elif connected and closed:
            await self.broker.unlink(RESERVE)
            self._report_state()

    async def _chain_is_connected(self) -> bool:
        assert self._config is not None
        for name in self._config.ring:
            other = self if name == self.context.name else self.context.sibling(name)
            if not isinstance(other, BrokerAdapter) or other.broker is None:
                return False
            try:
                links = await other.broker.links()
            except errors.MusterError:
                return False
            expected = other._config.links if other._config else ()
            up = {link.id for link in links if link.up}
            if not set(expected) <= up:
                return False
        return True

    # State

    def _changed(self, made: broker.Broker) -> None:
        if made is self.broker and made.state in (broker.BrokerState.FAILED, broker.BrokerState.RUNNING):
            self._report_state()

    def _observed(self) -> protocol.ObservedState:
        if self.broker is None:
            return protocol.ObservedState(self._config is not None, health.HealthState.DOWN, "not running")
        made = self.broker
        if made.state is broker.BrokerState.RUNNING:
            reserve = any(remote.id == RESERVE for remote in made.config.remotes)
            properties = {
                "url": made.url,
                "leaf_url": made.leaf_url,
                "pid": made.pid,
                "reserve_closed": reserve,
            }
            return protocol.ObservedState(True, health.HealthState.UP, properties=properties)
        reason = made.failure.message if made.failure is not None else made.state.value
        state = (
            health.HealthState.STARTING
            if made.state is broker.BrokerState.STARTING
            else health.HealthState.DOWN
        )
        return protocol.ObservedState(True, state, reason)

    def _report_state(self) -> None:
        self.context.report_state(self._observed())
