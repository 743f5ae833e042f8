"""Domains of real processes, and clients of them.

`LocalDomain` is one machine with three brokers of its own.  `Machines` is the guide
docs/guides/three-machines.md: each machine has a network namespace.
"""

from __future__ import annotations

import abc
import asyncio
import base64
import contextlib
import json
import random
import socket
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path

from muster import connection
from muster.app import home
from muster.app.machines import membership
from muster.bus.client import client as bus_client
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests.cli import driver
from tests.faults import network, outages, units

CLIENTS = 3
PORT = 4222
DISK = "128m"  # of each machine
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
        self.tls: ssl.SSLContext | None = None
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
        creds = trust.credentials(identity)
        return await bus_client.connect(servers, creds=creds, tls=self.tls, in_order=True)

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
        for override in overrides:
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
        await self._domain_unit("domain", self.home, [], [*SETTINGS]).start()
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


class Machines(Deployment):
    """The commands of docs/guides/three-machines.md, but each machine is run by a unit."""

    kind = "machines"
    home_name = "a"
    machines = 3
    targets = ("broker", "domain", "machine", "host-a", "host-b", "host-c", "host-d")
    names = ("a", "b", "c")
    behind_nat = "d"  # it has an agent and an information node, and no broker
    all_names = (*names, behind_nat)

    async def start(self) -> None:
        network.add_hub()
        for number, name in enumerate(self.names, 1):
            network.add_host(name, number)
        network.add_host_behind_nat(self.behind_nat, len(self.names) + 1)
        for name in self.all_names:  # a disk of its own
            (self.folder / name).mkdir()
            network.run("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.folder / name))
        own = network.address(1)
        await self.command("init", "--name", "fleet", "--host", own, "--set", "inform.replicas=2")
        await asyncio.to_thread(self._issue)
        await self._start_domain("a")
        for name in self.names[1:]:
            await self.join(name)
        await self.join(self.behind_nat, "--roles", "agent,information-node")
        self.servers = [f"tls://{network.address(number)}:{PORT}" for number in range(1, len(self.names) + 1)]
        bundle = self.home / "fleet" / "certs" / "bundle.pem"
        self.tls = await asyncio.to_thread(connection.trusting, str(bundle))
        await self._connect_operator()
        await eventually(self.is_replicated, timeout_s=60)

    async def join(self, name: str, *options: str) -> None:
        token = self.folder / f"{name}.token"
        token.write_text((await self.command("machine", "token", *options)).out)
        words = driver.command_line("--home", self.folder / name, "join", token, "--name", name, "--no-start")
        joined = await asyncio.create_subprocess_exec(
            *network.inside(name), *words, env=driver.environment(self.folder / name)
        )
        if await joined.wait():
            raise RuntimeError(f"{name} did not join")
        await self._start_domain(name)

    async def is_replicated(self) -> bool:
        return all(budget.replicas == 3 for budget in await self.operator.budgets())

    async def _start_domain(self, name: str) -> None:
        overrides = ["inform.replicas=2"]  # so that the third machine has temporary ones
        if name != self.behind_nat:
            overrides += [*SETTINGS, "manage.registries=1", "manage.managers=1"]
        await self._domain_unit(f"domain-{name}", self.folder / name, network.inside(name), overrides).start()

    def machine_of(self, broker: str) -> str:
        listed = membership.load(self.home / "fleet")
        assert listed is not None
        machine = next(known.name for known in listed.brokers if known.broker == broker)
        return "a" if machine == "local" else machine

    async def victim(self, target: str) -> Victim:
        if target.startswith("host-"):
            name = target.removeprefix("host-")
            return Victim(name, tuple(self.units[f"domain-{name}"].pids()))
        broker = await self.stream_leader("messages")
        name = self.machine_of(broker)
        unit = self.units[f"domain-{name}"]
        if target == "broker":
            file = self.folder / name / "fleet" / "brokers" / broker / "process.json"
            return Victim(broker, (json.loads(file.read_text())["pid"],))
        return Victim(name, tuple(unit.own_pids() if target == "domain" else unit.pids()))

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


KINDS: dict[str, type[Deployment]] = {"local": LocalDomain, "machines": Machines}


def report(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
