"""Admission of machines, on the machine that signs accounts.

A machine sends the public halves of keys that it has made, with the identity of its token, and receives the
documents for them: one for each part that its roles run (`membership.parts`), the certificate of its broker,
the public documents of the domain, and the list of machines. A registry receives the key of secrets, in a box
that only it can open. No key that signs leaves this machine.
"""

from __future__ import annotations

import pathlib
import secrets
import time

import msgspec

from muster.app import certificates, identities
from muster.app.machines import membership, program, roles
from muster.core import errors
from muster.core.net import hosts
from muster.core.settings import domain
from muster.core.telemetry import log
from muster.trust import certificates as certificates_
from muster.trust import keyring, machine_keys
from muster.trust.permissions import roles as permission_roles

PORT, ROUTE_PORT = 4222, 6222

events = log.EventLog("app")


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``keys``: public keys, by identity. ``box``: the public key for boxes to this machine."""

    name: str
    address: str
    zone: str
    keys: dict[str, str]
    box: str
    certificate_key: str = ""
    port: int = PORT
    route_port: int = ROUTE_PORT


class JoinedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """``users``: documents by identity. ``secrets``: a sealed box, for a registry."""

    domain: str
    machines: membership.MachineList
    users: dict[str, str]
    documents: machine_keys.PublicDocuments
    bundle: str
    certificate: str = ""
    secrets: str = ""


class DirectoryPage(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine follows. ``certificate``: a new one, if it has sent a key for it."""

    machines: membership.MachineList
    documents: machine_keys.PublicDocuments
    bundle: str
    certificate: str = ""
    logins: dict[str, str] | None = None  # for a gateway: all records of passwords; None: as before


class MachineAdmission:
    """All methods block."""

    def __init__(self, settings: domain.BaseSettings, trust: keyring.Keyring) -> None:
        self._settings = settings
        self._trust = trust
        self._keys = machine_keys.MachineKeys(trust)
        self._passwords = trust.passwords()
        self._folder = settings.domain.folder

    def machines(self) -> membership.MachineList:
        known = membership.load(self._folder)
        if known is None:
            raise errors.Refused(
                "no machine can join this domain: its broker accepts no brokers of other machines",
                hint="create a home that does: `muster init --host ADDRESS`; `muster restore` moves the data",
            )
        return known

    def join(self, machine_roles: tuple[str, ...], request: JoinRequest) -> JoinedMachine:
        name = membership.check_name(request.name)
        machines = self.machines()
        expected = membership.parts(name, machine_roles, request.zone)
        if set(request.keys) != set(expected):
            raise errors.InvalidInput(
                f"{name} sent keys for {', '.join(sorted(request.keys))}; its roles need "
                f"{', '.join(sorted(expected))}",
                hint="the same version of Muster on both machines",
            )
        # All that may be refused comes first: others follow the list as it is.
        machine = self._machine(name, machine_roles, request, machines)
        certificate = self._certificate(machine, request.certificate_key)
        if certificate:
            machine = msgspec.structs.replace(machine, pins=(certificates_.pin(certificate.encode()),))
        has_secrets = roles.MachineRole.REGISTRY in machine_roles
        sealed = self._keys.seal_secrets(request.box, name) if has_secrets else ""
        held = self._keys.of(name)
        if machines.get(name) is not None and held != request.keys:
            raise errors.Conflict(
                f"the domain has a machine {name!r} already",
                hint=f"choose another name with --name, or `muster machine remove {name}` if it is lost",
            )
        if any(request.keys.get(identity) != key for identity, key in held.items()):
            self._keys.revoke(name)  # of a request that was not completed
        users = self._keys.issue(
            name, expected, request.keys, shared=membership.SHARED, may_run_commands=("admin",)
        )
        machines = membership.update(self._folder, lambda latest: latest.put_again(machine))
        return JoinedMachine(
            domain=self._settings.domain.name,
            machines=msgspec.structs.replace(machines, own=name),
            users=users,
            documents=self._keys.documents(),
            bundle=certificates.bundle(self._settings).read_text(),
            certificate=certificate,
            secrets=sealed,
        )

    def page(self, machine: str, after: int, certificate_key: str, logins: str) -> DirectoryPage:
        """``logins``: the digest of those that a gateway has; empty: it wants none."""
        machines = self.machines()
        known = machines.get(machine)
        if known is None:
            raise errors.Forbidden(f"{machine!r} is not a machine of this domain any more")
        if certificate := self._certificate(known, certificate_key):
            pin = certificates_.pin(certificate.encode())
            machines = membership.update(self._folder, lambda latest: latest.with_pin(machine, pin))
        return DirectoryPage(
            machines=msgspec.structs.replace(machines, own=machine),
            documents=self._keys.documents(after),
            bundle=certificates.bundle(self._settings).read_text(),
            certificate=certificate,
            logins=self._logins(logins) if logins and roles.MachineRole.GATEWAY in known.roles else None,
        )

    def _logins(self, held: str) -> dict[str, str] | None:
        if self._passwords.digest() == held:
            return None
        records = self._passwords.records()
        if sum(map(len, records.values())) > machine_keys.DOCUMENTS_BYTES:
            events.error("too-many-logins", logins=len(records), limit_bytes=machine_keys.DOCUMENTS_BYTES)
            return None  # it goes on with those that it has
        return records

    def check_signed(self, machine: str, proof: str, *words: str) -> None:
        """`errors.Forbidden` if another machine requests this in its name."""
        self._keys.check_signed(machine, identities.SELF, proof, *words)

    def login(self, machine: str, identity: str, role: str, public: str) -> str:
        """The document with which a gateway acts for a login, for a key of its own."""
        known = self._known(self.machines(), machine)
        if roles.MachineRole.GATEWAY not in known.roles:
            raise errors.Forbidden(f"{machine!r} has no gateway")
        return self._keys.issue_login(machine, identity, permission_roles.Role.named(role), public)

    def choose_program(self, name: str, path: str) -> program.ChosenProgram:
        if not pathlib.PurePath(path).is_absolute():
            raise errors.InvalidInput(f"{path!r} is not the absolute path of a program")
        chosen = program.ChosenProgram(path, time.time())

        def change(latest: membership.MachineList) -> membership.MachineList:
            return latest.put(msgspec.structs.replace(self._known(latest, name), program=chosen))

        membership.update(self._folder, change)
        return chosen

    @staticmethod
    def _known(machines: membership.MachineList, name: str) -> membership.Machine:
        machine = machines.get(name)
        if machine is None:
            raise errors.NotFound(
                f"the domain has no machine {name!r}",
                hint=f"there are: {', '.join(known.name for known in machines.machines)}",
            )
        return machine

    def remove(self, name: str) -> membership.Machine:
        """Revoke the machine's keys. To be published, as `Keyring.revoke`."""
        machines = self.machines()
        machine = self._known(machines, name)
        if name == machines.own:
            raise errors.Refused(
                f"{name!r} is the machine that signs accounts: it cannot be removed here",
                hint="restore its keys on another machine first (docs/guides/three-machines.md)",
            )
        self._keys.revoke(name)
        membership.update(self._folder, lambda latest: latest.without(name))
        return machine

    def _machine(
        self,
        name: str,
        machine_roles: tuple[str, ...],
        request: JoinRequest,
        machines: membership.MachineList,
    ) -> membership.Machine:
        """Checked, because it becomes a part of the configuration of all brokers."""
        hosts.check_host(request.address, "address")
        machine = membership.Machine(
            name=name, roles=machine_roles, address=request.address, since_s=time.time()
        )
        if roles.MachineRole.BROKER not in machine_roles:
            return machine
        for port in (request.port, request.route_port):
            if not 1 <= port <= 65535:
                raise errors.InvalidInput(f"{port} is not a port: 1 to 65535")
        for other in machines.brokers:
            if other.name != name and (other.address, other.port) == (request.address, request.port):
                raise errors.Conflict(
                    f"{other.name} has the address {request.address}, port {request.port}",
                    hint="name that of this machine with --address",
                )
        return msgspec.structs.replace(
            machine,
            # Not the name of a broker that was removed: the others refuse it for five minutes.
            broker=f"{self._settings.domain.name}-{name}-{secrets.token_hex(2)}",
            port=request.port,
            route_port=request.route_port,
        )

    def _certificate(self, machine: membership.Machine, key: str) -> str:
        if not key or not (machine.broker or roles.MachineRole.GATEWAY in machine.roles):
            return ""
        return self._store().sign(
            machine.name,
            [machine.address, "localhost", "127.0.0.1", "::1"],
            key,
            lifetime_s=self._settings.trust.certificate_lifetime_s,
        )

    def _store(self) -> certificates_.CertificateStore:
        return certificates.open_store(self._settings)
