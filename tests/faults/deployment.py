"""Domains of real processes, and clients of them.

`LocalDomain` is one machine with three brokers of its own.  `ThreeMachines` is the guide
docs/guides/three-machines.md: each machine has a network namespace, a broker that the operating system runs,
and a domain process.
"""

from __future__ import annotations

import abc
import asyncio
import base64
import contextlib
import json
import random
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from muster.app import home
from muster.bus.client import client as bus_client
from muster.trust.permissions import roles
from tests.cli import driver
from tests.faults import network, outages, proxy, units

CLIENTS = 3
PORT, ROUTE_PORT = 4222, 6222
MONITOR = "127.0.0.1:8222"
ROLES = {"user": roles.Role.USER, "publisher": roles.Role.USER, "operator": roles.Role.OPERATOR}
SETTINGS = (
    "web.enabled=false",
    "channel.enabled=true",
    "channel.hold_s=0.5",
)
CLOCK = Path(__file__).parent / "clock"  # a folder with a sitecustomize.py that moves the clock


@dataclass(frozen=True)
class Victim:
    """Processes that fail together."""

    name: str
    pids: tuple[int, ...]


class Deployment(outages.Drill, abc.ABC):
    """What both kinds of domain have in common."""

    kind: str
    machines: int
    home_name: str
    targets: tuple[str, ...]  # which processes can be chosen to fail

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder / self.home_name)
        self.folder = folder  # of the domain; it may be full
        self.scratch = folder.parent  # of clients
        self.chance = random.Random(seed)
        self.units: dict[str, units.Unit] = {}
        self.operator: bus_client.NatsBus

    @abc.abstractmethod
    async def start(self) -> None: ...

    async def stop(self) -> None:
        await self._stack.aclose()
        await asyncio.gather(*(unit.stop() for unit in self.units.values()))

    @abc.abstractmethod
    async def victim(self, target: str) -> Victim: ...

    # Clients.

    def _issue(self) -> None:
        """Credentials of all clients, before the keys are copied."""
        trust = self.keyring()
        for name, role in ROLES.items():
            for number in range(1, CLIENTS + 1):
                trust.issue(f"{name}-{number}", role)

    async def connect(self, identity: str, first: int) -> bus_client.NatsBus:
        """A client that connects to broker ``first`` if it can."""
        trust = self.keyring()
        servers = self.servers[first:] + self.servers[:first]
        return await bus_client.connect(servers, creds=trust.credentials(identity), in_order=True)

    async def _connect_operator(self) -> None:
        self.operator = await self.connect("operator-1", 0)
        self._stack.push_async_callback(self.operator.close)

    # What is where.

    async def stream_leader(self, stream: str) -> str:
        info = await self.operator.storage.call(f"STREAM.INFO.{stream}")
        return str(info["cluster"]["leader"])

    async def lease_holder(self, key: str) -> str:
        entry = await self.operator.storage.call(
            "STREAM.MSG.GET.KV_leases", {"last_by_subj": f"$KV.leases.{key}"}
        )
        return str(json.loads(base64.b64decode(entry["message"]["data"]))["holder"])

    def _domain_unit(self, name: str, folder: Path, words: list[str], overrides: list[str]) -> units.Unit:
        command = [*words, *driver.command_line("--home", folder, "up", "--log-file")]
        for override in (*SETTINGS, *overrides):
            command += ["--set", override]
        unit = units.Unit(
            name, command, driver.environment(folder), self.folder / f"{name}.log", watched=True
        )
        self.units[name] = unit
        return unit


class LocalDomain(Deployment):
    kind = "local"
    home_name = "home"
    machines = 1
    targets = ("broker", "registry", "manager", "domain")

    async def start(self) -> None:
        port = _free_ports(CLIENTS)
        await self.command("init", "--brokers", "3", "--port", str(port))
        await asyncio.to_thread(self._issue)
        await self._domain_unit("domain", self.home, [], []).start()
        self.servers = [broker["url"] for broker in (await self.status())["brokers"]]
        await self._connect_operator()

    async def pids(self, rows: str) -> dict[str, int]:
        return {row["name"]: row["pid"] for row in (await self.status())[rows]}

    async def victim(self, target: str) -> Victim:
        if target == "domain":
            return Victim("domain", (self.units["domain"].pid,))
        if target == "broker":
            name = await self.stream_leader("messages")
            return Victim(name, ((await self.pids("brokers"))[name],))
        name = await self.lease_holder("manage.registry") if target == "registry" else "manager-1"
        return Victim(name, ((await self.pids("management"))[name],))

    def broker_folder(self, name: str) -> Path:
        return Path(self.settings().domain.folder) / "brokers" / name


class ThreeMachines(Deployment):
    kind = "machines"
    home_name = "a"
    machines = 3
    targets = ("broker", "domain", "machine")
    names = ("a", "b", "c")

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.proxies: list[proxy.DelayProxy] = []

    async def start(self) -> None:
        network.add_hub()
        for number, name in enumerate(self.names, 1):
            network.add_host(name, number)
        await self._start_proxies()
        servers = ",".join(self._urls())
        await self.command(
            *("init", "--name", "fleet", "--set", f"bus.servers={servers}", "--set", "bus.brokers=3"),
        )
        await asyncio.to_thread(self._issue)
        trust = self.keyring()
        for agent, suffix in (("local", ""), ("b", "-b"), ("c", "-c")):
            for kind, role in (("registry", roles.Role.REGISTRY), ("manager", roles.Role.MANAGER)):
                await asyncio.to_thread(trust.issue, f"{kind}{suffix}-1", role)
            await asyncio.to_thread(trust.issue, agent, roles.Role.AGENT)
            await asyncio.to_thread(trust.issue, f"channel{suffix}", roles.Role.CHANNEL)
        for name in self.names[1:]:
            await asyncio.to_thread(shutil.copytree, self.home, self.folder / name)
            (self.folder / name / "fleet/keys/keys/signing.seed").unlink()
        for number, name in enumerate(self.names, 1):  # ready before there is a leader
            accounts = self.folder / f"broker-{name}" / "accounts"
            document = (await self.command("broker", "trust", "--accounts", str(accounts))).out
            await self._broker_unit(number, name, document).start()
        self.servers = self._urls()
        await asyncio.gather(*(self._start_domain(name) for name in self.names))
        await self._connect_operator()

    def _urls(self) -> list[str]:
        return [f"nats://{network.HUB}:{PORT + number}" for number in range(1, len(self.names) + 1)]

    async def _start_proxies(self) -> None:
        """One in front of each broker, for its clients and for the other brokers."""
        for number in range(1, len(self.names) + 1):
            for port in (PORT, ROUTE_PORT):
                to = network.address(number), port
                self.proxies.append(proxy.DelayProxy(network.HUB, port + number, to, self.chance))
                await self.proxies[-1].start()
                self._stack.push_async_callback(self.proxies[-1].stop)

    def _broker_unit(self, number: int, name: str, trust: str) -> units.Unit:
        folder = self.folder / f"broker-{name}"
        folder.mkdir()
        routes = ", ".join(
            f"nats://{network.HUB}:{ROUTE_PORT + other}"
            for other in range(1, len(self.names) + 1)
            if other != number
        )
        own = network.address(number)
        pings, route_pings = (f'ping_interval: "{seconds}s", ping_max: 2' for seconds in (2.25, 1))
        (folder / "trust.conf").write_text(trust)
        (folder / "nats.conf").write_text(
            f"server_name: {name}\nlisten: {own}:{PORT}\nclient_advertise: {network.HUB}:{PORT + number}\n"
            f"http: {MONITOR}\n{pings}\nmax_payload: 1114112\ninclude trust.conf\n"
            f"jetstream {{ store_dir: {folder}/data, sync_interval: always, max_file_store: 64GB }}\n"
            f"cluster {{ name: fleet, listen: {own}:{ROUTE_PORT}, routes: [{routes}], "
            f"cluster_advertise: {network.HUB}:{ROUTE_PORT + number}, {route_pings} }}\n"
        )
        run = driver.command_line("broker", "run", folder / "nats.conf", "--monitor", f"http://{MONITOR}")
        unit = units.Unit(
            f"broker-{name}",
            [*network.inside(name), *run],
            driver.environment(folder),
            self.folder / f"broker-{name}.log",
            watched=True,
            kill_all=True,
        )
        self.units[unit.name] = unit
        return unit

    async def _start_domain(self, name: str) -> None:
        overrides = [
            f"domain.zone={name}",
            *((f"manage.agent_name={name}", f"channel.name=channel-{name}") if name != "a" else ()),
            "inform.replicas=2",  # so that the third machine has temporary ones
            "manage.registries=1",
            "manage.managers=1",
        ]
        await self._domain_unit(f"domain-{name}", self.folder / name, network.inside(name), overrides).start()

    async def victim(self, target: str) -> Victim:
        name = await self.stream_leader("messages")
        if target == "broker":
            unit = self.units[f"broker-{name}"]
            return Victim(f"broker-{name}", tuple(pid for pid in unit.pids() if pid != unit.pid))
        if target == "domain":
            return Victim(name, tuple(self.units[f"domain-{name}"].own_pids()))
        pids = [pid for kind in ("domain", "broker") for pid in self.units[f"{kind}-{name}"].pids()]
        return Victim(name, tuple(pids))

    def agent(self, name: str) -> str:
        """The agent of a machine."""
        return "local" if name == self.home_name else name

    def version(self, name: str) -> str:
        """The version of Muster that runs on a machine."""
        running = home.DomainFolder(self.folder / name / "fleet").running()
        return "none" if running is None else running.version

    def skew(self, name: str, by_s: float) -> None:
        """Move the clock of a machine's processes at their next start, through Python's own clock."""
        path = f"{CLOCK}:{driver.environment()['PYTHONPATH']}"
        self.units[f"domain-{name}"].environment |= {"PYTHONPATH": path, "MUSTER_FAULTS_CLOCK_S": f"{by_s}"}


def _free_ports(count: int) -> int:
    """The first of some consecutive ports that are free."""
    for port in range(14_222, 30_000, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for number in range(port, port + count):
                listener = stack.enter_context(socket.socket())
                listener.bind(("127.0.0.1", number))
            return port
    raise RuntimeError("no free ports")


KINDS: dict[str, type[Deployment]] = {"local": LocalDomain, "machines": ThreeMachines}


def report(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
