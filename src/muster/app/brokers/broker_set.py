"""The domain's own brokers: started from the settings, watched, and changed while they run.

`verbs` is what `muster.app.operations.control` offers over the bus, and so ``muster broker`` on the command
line.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.app import certificates, home, identities
from muster.app.brokers import broker_configs
from muster.app.operations import control
from muster.bus.brokers import broker, config, network
from muster.core import backoff, errors, subjects
from muster.core.net import hosts
from muster.core.settings import domain
from muster.core.telemetry import metrics
from muster.trust import jwt, keyring
from muster.trust.permissions import roles


class BrokerSet:
    def __init__(self, settings: domain.BaseSettings, folder: home.DomainFolder) -> None:
        self._settings = settings
        self._folder = folder
        self._network: network.BrokerNetwork | None = None
        self._trusted: broker_configs.BrokerTrustFiles
        self._restarts: metrics.Gauge
        self._account = ""
        self._own: frozenset[str] = frozenset()  # those of the settings
        self._link_creds: Path
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._on_failure: Callable[[BaseException], None] = lambda _: None

    @property
    def running(self) -> network.BrokerNetwork:
        if self._network is None:
            raise errors.NotConnected("the domain's brokers do not run")
        return self._network

    @property
    def urls(self) -> tuple[str, ...]:
        return () if self._network is None else tuple(self._network.urls)

    async def start(
        self, trust: keyring.Keyring, *, measure: metrics.Metrics, on_failure: Callable[[BaseException], None]
    ) -> None:
        """When this returns they accept clients. ``on_failure`` hears of a broker that was given up."""
        self._on_failure = on_failure
        self._restarts = measure.gauge("broker_restarts", "Times a broker fell and came back.", ("broker",))
        self._trusted = await asyncio.to_thread(self._gather, trust)
        self._link_creds = await asyncio.to_thread(
            identities.credentials_file, trust, identities.LINK, roles.Role.LINK
        )
        system = await asyncio.to_thread(identities.system_credentials, trust)
        bus = self._settings.bus
        self._network = network.BrokerNetwork(
            broker_configs.broker_configs(self._settings, self._trusted, self._folder.brokers),
            program=Path(bus.binary) if bus.binary else None,
            supervise=backoff.BackoffPolicy(pause_s_max=bus.restart_wait_max_s),
            system_credentials=system,
        )
        await self._network.start()
        self._own = frozenset(self._network.brokers)
        for name in self._own:
            self._watch(name)
        for leaf, parent in broker_configs.leaf_parents(self._settings).items():
            await self.link(leaf, parent)

    async def stop(self) -> None:
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        self._watchers.clear()
        if self._network is not None:
            await self._network.stop()
            self._network = None

    async def reload(self) -> None:
        """Have all of them read their files again, also if some cannot."""
        outcomes = await asyncio.gather(
            *(one.reload() for one in self.running.brokers.values()), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    # Changes while they run

    def verbs(self) -> dict[str, control.Verb]:
        return {
            "list": self.describe,
            "links": self.links,
            "start": self.start_one,
            "stop": self.stop_one,
            "link": self.link,
            "unlink": self.unlink,
        }

    async def describe(self) -> list[dict[str, Any]]:
        return [await _describe(one) for one in self.running.brokers.values()]

    async def links(self) -> list[dict[str, Any]]:
        return [
            {
                "id": self._shown(one.id),
                "kind": one.kind.value,
                "near": one.near,
                "far": one.far,
                "up": one.up,
                "round_trip_ms": None if one.round_trip_s is None else round(one.round_trip_s * 1000, 3),
                "in_messages": one.in_messages,
                "out_messages": one.out_messages,
            }
            for one in await self.running.links()
        ]

    async def start_one(self, name: str, storage: bool = True, below: str | None = None) -> dict[str, Any]:
        """One more broker on this machine: a leaf ``below`` another, or alone until it is linked."""
        subjects.token(name)
        if below is not None:
            _ = self.running[below]  # complain before anything is started
        await self.running.add(
            broker_configs.extra(self._settings, self._trusted, self._folder.brokers, name, storage=storage)
        )
        self._watch(name)
        if below is not None:
            await self.link(name, below)
        return await _describe(self.running[name])

    async def stop_one(self, name: str) -> dict[str, Any]:
        """Stop a broker that `start_one` started. Those of the settings stay: the domain stands on them."""
        described = await _describe(self.running[name])
        if name in self._own:
            raise errors.Refused(
                f"broker {name} belongs to the domain's settings",
                hint="change bus.brokers or bus.leaves and restart the domain; `muster down` stops all",
            )
        self._watchers.pop(name).cancel()
        for one in self.running.brokers.values():
            for remote in one.config.remotes:
                if remote.far == name:
                    await self.running.unlink(remote.id)
        await self.running.remove(name)
        return described | {"state": broker.BrokerState.STOPPED.value}

    async def link(self, near: str, far: str) -> dict[str, Any]:
        """Hang ``near`` on ``far``: a broker of this domain, or the URL of a leaf listener elsewhere."""
        if "://" in far:
            hosts.host_of_url(far, "FAR")
            hosts.without_password(far, "FAR", "a link has the domain's own credentials")
            remote = config.LeafRemote(
                id=f"{near}>{far}",
                urls=(far,),
                far=None,
                account=self._account,
                credentials_file=self._link_creds,
            )
            await self.running[near].link(remote)
            return {"id": remote.id, "near": near, "far": far}
        id = await self.running.link(near, far, account=self._account, credentials_file=self._link_creds)
        return {"id": self._shown(id), "near": near, "far": far}

    async def unlink(self, id: str) -> dict[str, Any]:
        known = {remote.id for one in self.running.brokers.values() for remote in one.config.remotes}
        full = f"{id}:{self._account}"
        await self.running.unlink(full if full in known else id)
        return {"id": id}

    def _shown(self, id: str) -> str:
        """Of links, only those of our own account are made here: no need to show its key."""
        return id.removesuffix(f":{self._account}")

    # Inside

    def _gather(self, trust: keyring.Keyring) -> broker_configs.BrokerTrustFiles:
        """All that the brokers are given besides settings. Blocks."""
        documents = trust.broker()
        tls = None
        if self._settings.bus.uses_tls:
            certificates.ensure(self._settings)
            tls = certificates.broker_tls(self._settings)
        named = {jwt.read(document).name: key for key, document in documents.accounts.items()}
        self._account = named[self._settings.domain.name]
        operator = config.OperatorTrust(
            operator_jwt=documents.operator_jwt,
            system_account=documents.system_account,
            accounts=documents.accounts,
        )
        return broker_configs.BrokerTrustFiles(operator=operator, secret=secrets.token_urlsafe(24), tls=tls)

    def _watch(self, name: str) -> None:
        one = self.running[name]

        async def given_up() -> None:
            await one.wait_for(broker.BrokerState.FAILED)
            self._on_failure(one.failure or errors.Unavailable(f"broker {name} was given up"))

        self._restarts.read_from(lambda: float(one.restarts), broker=name)
        self._watchers[name] = asyncio.create_task(given_up(), name=f"watch {name}")


async def _describe(one: broker.Broker) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": one.name,
        "state": one.state.value,
        "pid": one.pid,
        "url": one.url,
        "monitor_url": one.monitor_url,
        "leaf_url": one.leaf_url,
        "websocket_url": one.websocket_url,
        "mqtt_url": one.mqtt_url,
        "restarts": one.restarts,
        "storage": str(one.config.store_path) if one.config.store_path else None,
        "log_file": str(one.config.log_path),
    }
    problem = await one.problem()
    if problem is not None:  # a full disk, above all: the broker itself runs on
        described["problem"] = str(problem)
    with contextlib.suppress(errors.MusterError):
        seen = await one.ask("varz")
        described["version"] = seen["version"]
        described["connections"] = seen["connections"]
        described["memory_bytes"] = seen["mem"]
        described["cpu_percent"] = seen["cpu"]
        described["in_messages"] = seen["in_msgs"]
        described["out_messages"] = seen["out_msgs"]
        described["slow_consumers"] = seen["slow_consumers"]
    return described
