"""The machines of a domain, and what follows from their roles. Pure, but for the file of the list.

The machine that signs accounts admits the others and has the list; they follow it (`follower`). Brokers form
one cluster. A cluster of two has no majority without both, so a second broker stores nothing, and the streams
stay on the first. With the third, all store, and each stream has three replicas.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from muster.app.brokers import addresses
from muster.app.machines import program as program_
from muster.app.machines import roles as machine_roles
from muster.core import errors, files, subjects
from muster.core.settings import domain
from muster.trust import private_files
from muster.trust.permissions import own_names, roles

FILE = "machines.json"
RECOVERING = "recovering.json"  # while `muster recover` changes the storage
REPLICAS = 3
MANAGERS_MAX = 8  # of a machine that joins
AMQP_PORT = 5671
SILENT_S = 5.0  # machines report every second
SHARED = ("bootstrap", "admin", "system", "link", "message")  # parts with the same name on each machine


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """``address``: under which the others reach it. ``broker``: the name of its broker; empty: none.
    ``stores``: whether this broker has a part of the domain's storage. ``program``: which is to run it."""

    name: str
    roles: tuple[str, ...]
    address: str
    since_s: float
    broker: str = ""
    port: int = 0
    route_port: int = 0
    stores: bool = False
    program: program_.ChosenProgram | None = None
    pins: tuple[str, ...] = ()  # of the certificate of its broker, and of the one before that

    @property
    def url(self) -> str:
        return f"tls://{addresses.bracketed(self.address)}:{self.port}"

    @property
    def route(self) -> str:
        return f"nats://{addresses.bracketed(self.address)}:{self.route_port}"


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine says of itself. ``problem``: what does not work. ``refused``: a program that did not.
    ``amqp``: the URL of its gateway."""

    version: str
    program: str
    problem: str = ""
    refused: program_.ChosenProgram | None = None
    refused_reason: str = ""
    amqp: str = ""


class MachineRow(Machine, frozen=True, kw_only=True):
    """``report``: the last one, ``age_s`` ago; None: none since the machine that signs accounts started."""

    report: MachineReport | None = None
    age_s: float = 0.0

    @property
    def state(self) -> str:
        if self.report is None or self.age_s > SILENT_S:
            return "silent"
        return "late" if self.report.problem else "up"


class MachineList(msgspec.Struct, frozen=True, kw_only=True):
    """In the order in which they joined. ``own``: the name of this machine."""

    own: str
    machines: tuple[Machine, ...]

    @property
    def here(self) -> Machine:
        return next(machine for machine in self.machines if machine.name == self.own)

    @property
    def is_first(self) -> bool:
        """Whether this machine signs accounts and admits the others."""
        return self.own == self.machines[0].name

    @property
    def brokers(self) -> tuple[Machine, ...]:
        return tuple(machine for machine in self.machines if machine.broker)

    @property
    def storing(self) -> tuple[Machine, ...]:
        return tuple(machine for machine in self.brokers if machine.stores)

    @property
    def pins(self) -> tuple[str, ...]:
        """The certificates of all brokers; none while one is unknown."""
        if not all(machine.pins for machine in self.brokers):
            return ()
        return tuple(sorted(pin for machine in self.brokers for pin in machine.pins))

    @property
    def replicas(self) -> int:
        """Of each stream."""
        return REPLICAS if len(self.storing) >= REPLICAS else 1

    def unreplicated(self) -> str:
        """Why streams have one replica; empty if they have several."""
        if self.replicas > 1:
            return ""
        return (
            "streams are not replicated: only the broker of "
            f"{', '.join(machine.name for machine in self.storing)} stores them; there are {REPLICAS} "
            f"replicas with {REPLICAS} brokers, and this domain has {len(self.brokers)}"
        )

    @property
    def remote_urls(self) -> tuple[str, ...]:
        return tuple(machine.url for machine in self.brokers if machine.name != self.own)

    def get(self, name: str) -> Machine | None:
        return next((machine for machine in self.machines if machine.name == name), None)

    def put(self, machine: Machine) -> MachineList:
        known = {other.name: other for other in self.machines} | {machine.name: machine}
        return msgspec.structs.replace(self, machines=tuple(known.values()))

    def put_again(self, machine: Machine) -> MachineList:
        """Of a machine that repeats its request, what the others know of its broker stays."""
        known = self.get(machine.name)
        if known is None:
            return self.put(machine)
        return self.put(
            msgspec.structs.replace(
                machine,
                broker=known.broker,
                stores=known.stores,
                since_s=known.since_s,
                program=known.program,
            )
        )

    def with_storing(self, machine: Machine) -> MachineList:
        """Its broker shares the storage, unless it has been removed or replaced."""
        if self.get(machine.name) != machine:
            return self
        return self.put(msgspec.structs.replace(machine, stores=True))

    def with_pin(self, name: str, pin: str) -> MachineList:
        """The certificate of a broker was renewed; the one before is valid until it is replaced."""
        machine = self.get(name)
        if machine is None or pin in machine.pins[:1]:
            return self
        return self.put(msgspec.structs.replace(machine, pins=(pin, *machine.pins[:1])))

    def without(self, name: str) -> MachineList:
        rest = tuple(machine for machine in self.machines if machine.name != name)
        return msgspec.structs.replace(self, machines=rest)

    def next_to_store(self, current: Collection[str]) -> Machine | None:
        """The next broker to share the storage, if those that do are ``current``: one at a time, so that each
        election has a majority that knows all streams."""
        storing = {machine.broker for machine in self.storing}
        if len(self.brokers) < REPLICAS or set(current) != storing:
            return None
        return next((machine for machine in self.brokers if not machine.stores), None)

    def lost(self, members: Collection[str]) -> list[str]:
        """The brokers that share the storage, but are not of a machine of the domain any more."""
        return sorted(set(members) - {machine.broker for machine in self.storing})


def load(folder: pathlib.Path) -> MachineList | None:
    """The list of a domain's folder. Blocks."""
    path = folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=MachineList)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidInput(f"{path}: {error}", hint="restore it from a backup") from error


def at_start(settings_: domain.BaseSettings, folder: pathlib.Path) -> MachineList | None:
    """The machines of the domain that starts; None: it is on one machine, and no other can join. Blocks."""
    known = load(folder)
    bus = settings_.bus
    if known is not None and known.is_first and bus.port:  # the settings may have changed
        here = msgspec.structs.replace(
            known.here,
            roles=_roles_of(settings_),
            address=addresses.reachable(bus)[0],
            port=bus.port,
            route_port=bus.route_port,
        )
        if here != known.here:
            known = known.put(here)
            store(folder, known)
    if known is not None or not bus.route_port or bus.servers:
        return known
    manage = getattr(settings_, "manage", None)
    own = Machine(
        name=manage.agent_name if manage is not None else "local",
        roles=_roles_of(settings_),
        address=addresses.reachable(bus)[0],
        since_s=time.time(),
        broker=f"{settings_.domain.name}-1",
        port=bus.port,
        route_port=bus.route_port,
        stores=True,
    )
    made = MachineList(own=own.name, machines=(own,))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    store(folder, made)
    return made


def _roles_of(settings_: domain.BaseSettings) -> tuple[str, ...]:
    """What the first machine runs by its settings."""
    manage = getattr(settings_, "manage", None)
    of_manage = {"registry": "registries", "manager": "managers", "agent": "agent"}
    sections = {"information-node": "inform", "channel": "channel", "gateway": "amqp"}

    def runs(role: str) -> bool:
        if role in of_manage:
            return manage is not None and manage.enabled and bool(getattr(manage, of_manage[role]))
        return role == "broker" or getattr(getattr(settings_, sections[role], None), "enabled", False)

    return tuple(role for role in machine_roles.ALL if runs(role))


def check_whole(folder: pathlib.Path) -> None:
    """`errors.Refused` after an interrupted recovery: the storage is not complete. Blocks."""
    if (folder / RECOVERING).exists():
        raise errors.Refused("`muster recover` was interrupted on this machine", hint="repeat it")


def is_joined(folder: pathlib.Path) -> bool:
    """Whether this is a machine that another one admitted. Blocks."""
    known = load(folder)
    return known is not None and not known.is_first


def update(folder: pathlib.Path, change: Callable[[MachineList], MachineList]) -> MachineList:
    """Change the list of the machine that signs accounts. Blocks."""
    with private_files.locked(folder):
        known = load(folder)
        if known is None:
            raise errors.NotFound(f"{folder} has no list of machines")
        changed = change(known)
        store(folder, changed)
        return changed


def store(folder: pathlib.Path, machines: MachineList) -> None:
    """Blocks."""
    files.write(folder / FILE, msgspec.json.format(msgspec.json.encode(machines)))


def check_name(name: str) -> str:
    subjects.identity(name)
    own_names.check(name, roles.Role.AGENT, of_machine=True)
    if name == "local" or name in SHARED:
        raise errors.Conflict(f"{name!r} is a name of the domain itself", hint="choose another with --name")
    return name


def parts(name: str, chosen: Sequence[str], zone: str) -> dict[str, roles.Role]:
    """The identities of what a machine runs, with their roles."""
    subjects.token(zone)
    own = {"bootstrap": roles.Role.BOOTSTRAP, "admin": roles.Role.OPERATOR}
    by_role: Mapping[str, dict[str, roles.Role]] = {
        machine_roles.MachineRole.BROKER: {"system": roles.Role.SYSTEM, "link": roles.Role.LINK},
        machine_roles.MachineRole.REGISTRY: {
            f"registry-{name}-1": roles.Role.REGISTRY,
            "message": roles.Role.GATEWAY,
            f"notifier-{name}": roles.Role.NOTIFIER,
        },
        machine_roles.MachineRole.MANAGER: {
            f"manager-{name}-{number}": roles.Role.MANAGER for number in range(1, MANAGERS_MAX + 1)
        },
        machine_roles.MachineRole.INFORMATION_NODE: {f"inform-{zone}-{name}-1": roles.Role.INFORMATION_NODE},
        machine_roles.MachineRole.CHANNEL: {f"channel-{name}": roles.Role.CHANNEL},
        machine_roles.MachineRole.GATEWAY: {},  # it acts as its clients
        machine_roles.MachineRole.AGENT: {name: roles.Role.AGENT, f"sensor-{name}": roles.Role.AGENT},
    }
    for role in chosen:
        own |= by_role[role]
    return own


def settings(
    machine: Machine, *, domain: str, zone: str, servers: Sequence[str], listen: str, certificate: str
) -> dict[str, Any]:
    """The settings of a machine that joins. ``servers``: brokers of others, if it has none."""
    gateway = {
        "amqp.enabled": True,
        "amqp.host": listen,
        "amqp.port": AMQP_PORT,
        "amqp.certificate": certificate,
    }
    has = {role: role in machine.roles for role in machine_roles.ALL}
    broker = {
        "bus.host": listen,
        "bus.tls": "on",
        "bus.names": [machine.address],
        "bus.port": machine.port,
        "bus.route_port": machine.route_port,
    }
    return {
        "domain.name": domain,
        "domain.data_dir": ".",
        "domain.zone": zone,
        **(broker if machine.broker else {"bus.servers": list(servers), "bus.locator": False}),
        "manage.enabled": has["registry"] or has["manager"] or has["agent"],
        "manage.agent_name": machine.name,
        "manage.registries": int(has["registry"]),
        "manage.managers": int(has["manager"]),
        "manage.agent": has["agent"],
        "inform.enabled": has["information-node"],
        "inform.nodes": 1,
        "message.enabled": has["registry"],
        "notify.enabled": has["registry"],
        "channel.enabled": has["channel"],
        "web.enabled": False,
        **(gateway if has["gateway"] else {}),
    }
