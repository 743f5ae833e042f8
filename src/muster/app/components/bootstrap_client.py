"""Requests to the bootstrap node of a domain: its processes, and the enrolment of machines.

    muster.manage.from.<identity>.domain.<verb>      verbs: processes, kill, token, approve, waiting, enrol

Only an operator may send these requests; ``enrol`` has the identity of an enrolment token.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from muster import connection
from muster.app import enrolment
from muster.app.machines import admission, membership, program
from muster.bus import api
from muster.bus.rpc import client as rpc
from muster.core import errors, subjects
from muster.manage import client as manage_client
from muster.manage import protocol
from muster.trust import credentials, nkeys

KIND = "domain"
DIRECTORY = "directory"  # the request of a machine that follows the others
TIMEOUT_S = 30.0
RETRY_S = 2.0

T = TypeVar("T")


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True):
    """A process of management. ``starts``: how often it was started."""

    name: str
    state: str
    pid: int | None = None
    starts: int = 0
    reason: str = ""


class KilledProcess(msgspec.Struct, frozen=True, kw_only=True):
    killed: str
    pid: int


class IssuedEnrolment(msgspec.Struct, frozen=True, kw_only=True):
    """A one-time token for the machine ``name``."""

    name: str
    token: str


async def redeem(
    token: enrolment.EnrolmentToken,
    public_key: str,
    *,
    name: str = "",
    join: admission.JoinRequest | None = None,
    proxy: str | None = None,
    waiting: Callable[[str], None],
) -> enrolment.EnrolledMachine:
    """Enrol this machine, as `BootstrapClient.enrol`, and wait for an approval. ``waiting`` is called with
    each new reason of a delay. Repeating this with the same key is safe."""
    tls = ssl.create_default_context(cadata=token.ca) if token.ca else None
    machine = await asyncio.to_thread(enrolment.machine_id)
    creds = credentials.Credentials.parse(token.creds)
    noted: set[str] = set()
    try:
        async with await connection.connect(token.servers, creds=creds, tls=tls, proxy=proxy) as bus:
            while True:
                try:
                    return await BootstrapClient(bus).enrol(public_key, machine=machine, name=name, join=join)
                except errors.Unavailable as error:  # the outcome may be unknown
                    if token.has_expired:
                        raise
                    if error.message not in noted:
                        waiting(f"{error.message}; {error.hint or 'retrying'}")
                    noted.add(error.message)
                    await asyncio.sleep(RETRY_S)
    except (errors.Unauthorized, errors.Unavailable) as error:
        if token.has_expired:
            raise errors.Forbidden("this token has expired", hint=enrolment.NEW_TOKEN_HINT) from error
        raise


async def renew(
    folder: Path, connect: Callable[[credentials.Credentials], Awaitable[api.Bus]], *, timeout_s: float = 30.0
) -> None:
    """Renew the document of the machine that joined with this folder."""
    own, joining = [
        await asyncio.to_thread(credentials.Credentials.load, folder / name)
        for name in (enrolment.CREDENTIALS, enrolment.JOINING)
    ]
    async with await connect(joining) as bus:
        answer = await BootstrapClient(bus, timeout_s=timeout_s).enrol(own.claims.sub, name=own.identity)
    later = credentials.Credentials(answer.joining, joining.seed)
    key = nkeys.KeyPair.from_seed(own.seed)
    await asyncio.to_thread(enrolment.write_credentials, folder, key, answer.jwt, later)


class BootstrapClient:
    def __init__(self, bus: api.Bus, *, timeout_s: float = TIMEOUT_S) -> None:
        self._bus = bus
        self._timeout_s = timeout_s

    async def processes(self) -> list[ProcessRow]:
        return await self._request(list[ProcessRow], "processes")

    async def kill(self, name: str, *, number: int = signal.SIGKILL) -> KilledProcess:
        """Send a signal to a process of management."""
        return await self._request(KilledProcess, "kill", name=name, number=number)

    async def token(
        self,
        name: str,
        *,
        approval: bool = False,
        lifetime_s: float = enrolment.LIFETIME_S,
        servers: Sequence[str] = (),
        machine_roles: Sequence[str] = (),
    ) -> IssuedEnrolment:
        """A one-time token. ``approval``: an operator has to approve the machine that uses it.
        ``machine_roles``: of a machine of the domain; it may choose its name, if that is empty."""
        return await self._request(
            IssuedEnrolment,
            "token",
            name=name,
            approval=approval,
            lifetime_s=lifetime_s,
            servers=list(servers),
            machine_roles=list(machine_roles),
        )

    async def approve(self, name: str) -> enrolment.ApprovedMachine:
        return await self._request(enrolment.ApprovedMachine, "approve", name=name)

    async def waiting(self) -> list[enrolment.WaitingMachine]:
        """Machines that requested admission and wait for approval."""
        rows = [row async for row in rpc.pages(self._bus, self._subject("waiting"))]
        return msgspec.convert(rows, list[enrolment.WaitingMachine])

    async def enrol(
        self,
        public_key: str,
        *,
        machine: str = "",
        name: str = "",
        join: admission.JoinRequest | None = None,
    ) -> enrolment.EnrolledMachine:
        """Enrol this machine, with the identity of a token; again with ``name`` to renew its document.
        ``join``: as a machine of the domain."""
        more = {} if join is None else {"join": msgspec.to_builtins(join)}
        return await self._request(
            enrolment.EnrolledMachine, "enrol", public_key=public_key, machine=machine, name=name, **more
        )

    async def machines(self) -> list[membership.MachineRow]:
        return await self._request(list[membership.MachineRow], "machines")

    async def choose_program(self, machine: str, path: str) -> program.ChosenProgram:
        """The machine changes to this program of its own, and reports it."""
        return await self._request(program.ChosenProgram, "choose-program", machine=machine, path=path)

    async def directory(
        self,
        machine: str,
        after: int,
        *,
        certificate_key: str = "",
        report: membership.MachineReport,
        logins: str = "",
        proof: str = "",
    ) -> admission.DirectoryPage:
        """What a machine that joined follows. ``proof``: its signature, if it requests a certificate or
        logins."""
        return await self._request(
            admission.DirectoryPage,
            DIRECTORY,
            machine=machine,
            after=after,
            certificate_key=certificate_key,
            report=msgspec.to_builtins(report),
            logins=logins,
            proof=proof,
        )

    async def remove_machine(self, name: str, *, leaves: bool = False) -> membership.Machine:
        """``leaves``: it does not return, so its agent is forgotten if nothing is assigned to it."""
        return await self._request(membership.Machine, "remove-machine", name=name, leaves=leaves)

    def _subject(self, verb: str) -> str:
        return subjects.from_identity(protocol.PART, self._bus.identity, KIND, verb)

    async def _request(self, kind: type[T], verb: str, **arguments: Any) -> T:
        reply = await manage_client.call(self._bus, self._subject(verb), arguments, timeout_s=self._timeout_s)
        return msgspec.convert(reply, kind)
