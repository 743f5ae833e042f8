"""The domain's own brokers: started from the settings, monitored, and changed at run time.

`verbs` are the operations of `muster.app.operations.control`, and of ``muster broker`` on the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from muster.app import certificates, home, identities
from muster.app.brokers import broker_configs
from muster.app.machines import membership
from muster.app.operations import control
from muster.bus.brokers import broker, config, diagnosis, files, network, storage, topology
from muster.bus.brokers import control as broker_control
from muster.bus.streams import integrity
from muster.core import backoff, errors, subjects, topics
from muster.core import files as core_files
from muster.core.net import hosts
from muster.core.settings import domain
from muster.core.telemetry import metrics
from muster.supervision import tasks
from muster.trust import jwt, keyring
from muster.trust.permissions import roles

SECRET_NAME = "routes.secret"
ACCOUNTS_S = 2.0  # between two looks at the keyring
SUBSCRIPTIONS_MAX = 20_000  # read of each broker for `topics`
TOPICS_MAX = 1_000


class BrokerSet:
    def __init__(
        self,
        settings: domain.BaseSettings,
        folder: home.DomainFolder,
        *,
        machines: membership.MachineList | None = None,
        outlive_s: float = 0.0,
    ) -> None:
        """``machines``: those of the domain, if it may have several. ``outlive_s``: how long the brokers run
        without this process and wait for its successor."""
        self._settings = settings
        self._machines = machines
        self._outlive_s = outlive_s
        self._folder = folder
        self._network: network.BrokerNetwork | None = None
        self._trust: keyring.Keyring
        self._trusted: broker_configs.BrokerTrustFiles
        self._restarts: metrics.Gauge
        self._account = ""
        self._published: dict[str, bytes] = {}  # the account that each broker has
        self._own: frozenset[str] = frozenset()  # the brokers of the settings
        self._link_creds: Path
        self._tasks = tasks.TaskSupervisor("brokers")
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._on_failure: Callable[[BaseException], None] = lambda _: None

    @property
    def running(self) -> network.BrokerNetwork:
        if self._network is None:
            raise errors.NotConnected("the domain's brokers are not running")
        return self._network

    @property
    def urls(self) -> tuple[str, ...]:
        """All brokers but islands. A client that stores nothing may use any of them."""
        members = {} if self._network is None else self._network.brokers
        islands = self.islands()
        return tuple(
            member.url
            for name, member in members.items()
            if not name.endswith(broker_configs.COMPANION) and name not in islands
        )

    def islands(self) -> set[str]:
        """The brokers without a link to those of the settings: what is published there reaches nobody else.
        A link to a broker elsewhere counts."""
        members = {} if self._network is None else self._network.brokers
        linked, before = set(self._own), -1
        while len(linked) != before:
            before = len(linked)
            for name, member in members.items():
                for remote in member.config.remotes:
                    if remote.far is None or linked & {name, remote.far}:
                        linked |= {name, remote.far or name}
        return set(members) - linked

    @property
    def root_urls(self) -> tuple[str, ...]:
        """The brokers with the domain's streams and leases: a leaf, or a broker that was started later, has
        its own, so a service that connected there would be alone."""
        members = {} if self._network is None else self._network.brokers
        roots = self._own - broker_configs.leaf_parents(self._settings).keys()
        own = tuple(
            member.url
            for name, member in members.items()
            if name in roots and not name.endswith(broker_configs.COMPANION)
        )
        return (*own, *self.remote_urls)

    @property
    def remote_urls(self) -> tuple[str, ...]:
        """The brokers of other machines of the domain."""
        return () if self._machines is None else self._machines.remote_urls

    async def start(
        self, trust: keyring.Keyring, *, measure: metrics.Metrics, on_failure: Callable[[BaseException], None]
    ) -> None:
        """The brokers accept clients when this returns. ``on_failure`` is called for a broker that was given
        up.
        """
        self._on_failure = on_failure
        self._restarts = measure.gauge("broker_restarts", "Times a broker was restarted.", ("broker",))
        self._trust = trust
        self._trusted = await asyncio.to_thread(self._gather)
        self._link_creds = await asyncio.to_thread(
            identities.credentials_file, trust, identities.LINK, roles.Role.LINK
        )
        system = await asyncio.to_thread(identities.system_credentials, trust)
        bus = self._settings.bus
        self._network = network.BrokerNetwork(
            self._configs(),
            program=Path(bus.binary) if bus.binary else None,
            supervise=backoff.BackoffPolicy(pause_s_max=bus.restart_wait_max_s),
            system_credentials=system,
            trust=self._current_trust,
            outlive_s=self._outlive_s,
        )
        _, claims = await asyncio.to_thread(trust.claims_update)
        await self._network.start()
        self._own = frozenset(self._network.brokers)
        # Those of a former process may have older accounts.
        self._published = {
            name: claims for name, member in self._network.brokers.items() if not member.adopted
        }
        self._tasks.loop("accounts", self._pass_on_accounts)
        for name in self._own:
            self._watch(name)
        for leaf, parent in broker_configs.leaf_parents(self._settings).items():
            await self.link(leaf, parent)
        await self._network.reload_adopted()

    def _configs(self) -> list[config.BrokerConfig]:
        return broker_configs.broker_configs(
            self._settings, self._trusted, self._folder.brokers, self._machines
        )

    async def follow(self, machines: membership.MachineList) -> None:
        """Other machines have joined or left, or this one shares the storage from now on."""
        self._machines = machines
        due = {made.name: made for made in self._configs()}
        own = machines.here.broker
        await self.running.reconfigure(due[own])
        companion = own + broker_configs.COMPANION
        if companion in self.running.brokers and companion not in due:
            watcher = self._watchers.pop(companion, None)
            if watcher is not None:
                watcher.cancel()
            await self.running.remove(companion)
            self._own -= {companion}

    async def storage_group(self) -> storage.StorageGroup:
        """The brokers that share the storage, also those of other machines."""
        return await self.running.storage_group()

    async def strike(self, name: str) -> None:
        """Remove a lost broker of another machine from those."""
        await self.running.strike(name)

    async def stop(self) -> None:
        await self._tasks.close()
        self._watchers.clear()
        if self._network is not None:
            await self._network.stop()
            self._network = None

    async def reload(self) -> None:
        """Have all brokers reload their files, even if some fail."""
        outcomes = await asyncio.gather(
            *(member.reload() for member in self.running.brokers.values()), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def full_disks(self) -> str:
        """The full disks of brokers; empty if there is none. Blocks."""
        members = () if self._network is None else self._network.brokers.values()
        full = (files.full_disk(member.config) for member in members)
        return "; ".join(str(error) for error in full if error is not None)

    async def recreate_replica(self, name: str, stream: str, placed: integrity.StreamReplicas) -> None:
        """Delete the replica of a stream on a broker, which creates it again from the other brokers."""
        await storage.recreate_replica(self.running[name], self._account, stream, placed)

    # Changes at run time

    def verbs(self) -> dict[str, control.Verb]:
        return {
            "list": self.describe,
            "links": self.links,
            "topics": self.topics,
            "start": self.start_one,
            "stop": self.stop_one,
            "link": self.link,
            "unlink": self.unlink,
        }

    async def describe(self) -> list[broker_control.BrokerDescription]:
        return [await self._describe(member) for member in list(self.running.brokers.values())]

    async def _describe(self, member: broker.Broker) -> broker_control.BrokerDescription:
        described = await _describe(member)
        if member.name not in self.islands() or described.problem:
            return described
        return msgspec.structs.replace(
            described, problem="it has no link to the other brokers: its clients reach only each other"
        )

    async def topics(self) -> list[str]:
        """The topics and patterns that have subscribers now, at most `TOPICS_MAX`."""
        subscribed: set[str] = set()
        for member in list(self.running.brokers.values()):
            with contextlib.suppress(errors.MusterError):
                page = await member.monitoring_page(f"subsz?subs=1&limit={SUBSCRIPTIONS_MAX}")
                subscribed |= {entry["subject"] for entry in page.get("subscriptions_list") or ()}
        patterns = []
        for subject in sorted(subscribed):
            if subject.startswith(f"{subjects.TOPIC_PREFIX}."):
                with contextlib.suppress(errors.InvalidInput):
                    patterns.append(str(topics.TopicPattern.parse(f"subject:{subject}")))
        return patterns[:TOPICS_MAX]

    async def links(self) -> list[broker_control.LinkRow]:
        return [msgspec.structs.replace(link, id=self._shown(link.id)) for link in await self.running.links()]

    async def start_one(
        self, name: str, storage: bool = True, below: str | None = None
    ) -> broker_control.BrokerDescription:
        """Start another broker on this machine: a leaf ``below`` another, or unlinked."""
        subjects.token(name)
        if below is not None:
            _ = self.running[below]  # fail before anything is started
        await self.running.add(
            broker_configs.extra(self._settings, self._trusted, self._folder.brokers, name, storage=storage)
        )
        self._watch(name)
        if below is not None:
            await self.link(name, below)
        return await self._describe(self.running[name])

    async def stop_one(self, name: str) -> broker_control.BrokerDescription:
        """Stop a broker that `start_one` started. Those of the settings cannot be stopped."""
        described = await _describe(self.running[name])
        if name in self._own:
            raise errors.Refused(
                f"broker {name} belongs to the domain's settings",
                hint="change bus.brokers or bus.leaves and restart the domain; `muster down` stops all",
            )
        await self.running.remove(name)
        if (watcher := self._watchers.pop(name, None)) is not None:
            watcher.cancel()
        return msgspec.structs.replace(described, state=broker.BrokerState.STOPPED.value)

    async def link(self, near: str, far: str) -> broker_control.LinkRow:
        """Link ``near`` to ``far``: a broker of this domain, or the URL of a leaf listener elsewhere."""
        if "://" in far:
            hosts.host_of_url(far, "FAR")
            hosts.without_password(far, "FAR", "a link uses the domain's own credentials")
            remote = config.LeafRemote(
                id=f"{near}>{far}",
                urls=(far,),
                far=None,
                account=self._account,
                credentials_file=self._link_creds,
            )
            await self.running[near].link(remote)
            id = remote.id
        else:
            id = await self.running.link(near, far, account=self._account, credentials_file=self._link_creds)
        return broker_control.LinkRow(
            id=self._shown(id), kind=topology.LinkKind.LEAF, near=near, far=far, up=True
        )

    async def unlink(self, id: str) -> broker_control.RemovedLink:
        known = {remote.id for member in self.running.brokers.values() for remote in member.config.remotes}
        full = f"{id}:{self._account}"
        await self.running.unlink(full if full in known else id)
        return broker_control.RemovedLink(id=id)

    def _shown(self, id: str) -> str:
        """The id of a link without the key of the account, which is always our own."""
        return id.removesuffix(f":{self._account}")

    # Internals

    def _gather(self) -> broker_configs.BrokerTrustFiles:
        """What the brokers need in addition to settings. Blocks."""
        tls = None
        if self._settings.bus.uses_tls:
            certificates.ensure(self._settings)
            tls = certificates.broker_tls(self._settings)
        operator = self._operator_trust()
        named = {jwt.read(document).name: key for key, document in operator.accounts.items()}
        self._account = named[self._settings.domain.name]
        return broker_configs.BrokerTrustFiles(operator=operator, secret=self._secret(), tls=tls)

    def _secret(self) -> str:
        """For the routes between brokers. The same for all that may run at the same time. Blocks."""
        if not self._outlive_s:
            return secrets.token_urlsafe(24)
        path = self._folder.brokers / SECRET_NAME
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if secret := path.read_text():
                return secret
        secret = secrets.token_urlsafe(24)
        core_files.write(path, secret.encode())
        return secret

    def _operator_trust(self) -> config.OperatorTrust:
        """The current accounts with their revocations. Blocks."""
        documents = self._trust.broker()
        return config.OperatorTrust(
            operator_jwt=documents.operator_jwt,
            system_account=documents.system_account,
            accounts=documents.accounts,
        )

    def _current_trust(self) -> config.OperatorTrust:
        """For a broker that starts. Without a readable keyring it starts with the last known accounts."""
        with contextlib.suppress(errors.MusterError):
            self._trusted = dataclasses.replace(self._trusted, operator=self._operator_trust())
        return self._trusted.operator

    async def _pass_on_accounts(self) -> None:
        """Send changes of the domain's account to each broker that does not have them.

        `muster creds revoke` sends them to one broker: those outside of its cluster do not receive them, nor
        does one that is down.
        """
        while True:
            _, claims = await asyncio.to_thread(self._trust.claims_update)
            for name, member in list(self.running.brokers.items()):
                if member.state is broker.BrokerState.RUNNING and self._published.get(name) != claims:
                    tls = None
                    if self._settings.bus.uses_tls:
                        tls = await asyncio.to_thread(certificates.client_tls, self._settings)
                    try:
                        await identities.publish_accounts(self._trust, [member.url], tls=tls)
                    except errors.Unavailable:
                        continue  # it has just ended
                    except errors.MusterError as error:  # the other brokers get them all the same
                        self._tasks.record_failure("accounts", error)
                    else:
                        self._published[name] = claims
            await asyncio.sleep(ACCOUNTS_S)

    def _watch(self, name: str) -> None:
        watched = self.running[name]

        async def given_up() -> None:
            await watched.wait_for(broker.BrokerState.FAILED)
            self._on_failure(watched.failure or errors.Unavailable(f"broker {name} was given up"))

        self._restarts.read_from(lambda: float(watched.restarts), broker=name)
        self._watchers[name] = self._tasks.loop(f"watch {name}", given_up)


async def _describe(member: broker.Broker) -> broker_control.BrokerDescription:
    state = member.state.value
    problem = await member.problem()  # for example a full disk: the broker continues to run
    if isinstance(problem, diagnosis.BrokerFailed) and problem.fault is diagnosis.BrokerFault.SILENT:
        state = problem.fault.value
    seen: dict[str, Any] = {}
    with contextlib.suppress(errors.MusterError):
        seen = await member.monitoring_page("varz")
    return broker_control.BrokerDescription(
        name=member.name,
        state=state,
        pid=member.pid,
        url=member.url,
        monitor_url=member.monitor_url,
        leaf_url=member.leaf_url,
        websocket_url=member.websocket_url,
        mqtt_url=member.mqtt_url,
        restarts=member.restarts,
        storage=str(member.config.store_path) if member.config.store_path else None,
        log_file=str(member.config.log_path),
        problem=None if problem is None else str(problem),
        version=seen.get("version"),
        connections=seen.get("connections"),
        memory_bytes=seen.get("mem"),
        cpu_percent=seen.get("cpu"),
        in_messages=seen.get("in_msgs"),
        out_messages=seen.get("out_msgs"),
        slow_consumers=seen.get("slow_consumers"),
    )
