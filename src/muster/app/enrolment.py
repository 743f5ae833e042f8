"""Enrolment: a one-time token for credentials whose private key never leaves the machine.

A token contains the addresses of the brokers, the certificates to trust, and the credentials of an identity
that may only request admission (the role ``joining``). The machine creates a key, sends its public half, and
receives a signed document for the name of the token; the token is then spent. From the first request on, the
token is bound to that key: a repeated request gets the same reply, and an operator approves exactly the
machine that sent the request.

A reinstalled machine enrols under its old name: the old key is revoked, so no process can use it any more,
and its resources are created again.

The document of a machine expires, so that a revocation need not be stored forever (`RENEW_AT`). The machine
renews it with the identity of its token, also when it was switched off until the document had expired: that
identity may only request the document of a key that is the current one of its name.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pathlib
import secrets
import time
from typing import Any, Protocol

import msgspec

from muster.app.machines import admission, membership
from muster.core import errors, files, subjects
from muster.core.net import hosts
from muster.manage import protocol, rows
from muster.trust import credentials, keyring, nkeys
from muster.trust.permissions import own_names, roles

_KEY = "joining.seed"
CREDENTIALS = "agent.creds"
JOINING = "joining.creds"
NEW_TOKEN_HINT = "create another one: `muster machine token`, or `muster agent token NAME`"
PREFIX = "join-"
LIFETIME_S = 3600.0
JOINING_S = 400 * 86400.0  # of the identity with which a machine renews: it may be switched off for so long
RENEW_AT = 0.25  # of the lifetime
RESERVED = 2000  # revocations that replaced machines leave to operators


class EnrolmentToken(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a token. It is a secret until it is spent."""

    servers: tuple[str, ...]
    creds: str
    name: str
    expires_at_s: float
    ca: str = ""
    locator: str = ""
    roles: tuple[str, ...] = ()  # of a machine of the domain; empty: it only has an agent
    chosen: bool = False  # whether an operator chose the servers: no others can be reached

    @property
    def has_expired(self) -> bool:
        return self.expires_at_s < time.time()

    def render(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> EnrolmentToken:
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(text.strip() + "=="), type=cls)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise errors.InvalidInput(
                "this is not a token", hint="`muster machine token` or `muster agent token NAME` creates one"
            ) from error


class EnrolmentRecords(Protocol):
    """The records of tokens and agents, which are the registry's: `muster.manage.client.ManageClient`."""

    async def enrolments(self) -> list[rows.EnrolmentRow]: ...
    async def enrolment(self, token: str) -> rows.EnrolmentRow | None: ...
    async def set_enrolment(
        self, token: str, enrolment: rows.Enrolment, *, version: int
    ) -> rows.EnrolmentRow: ...
    async def forgotten(self) -> list[rows.ForgottenAgent]: ...
    async def undrain(self, name: str, kind: protocol.DrainKind) -> rows.DrainResult: ...


class EnrolledMachine(msgspec.Struct, frozen=True, omit_defaults=True):
    """The name of a machine, the document that admits its key, and ``joining``, with which it renews that.
    ``replaced``: a previous key of the same name was revoked, which the brokers must learn."""

    name: str
    jwt: str
    replaced: bool = False
    joining: str = ""
    joined: admission.JoinedMachine | None = None  # of a machine of the domain


class WaitingMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that waits for approval as ``name``. ``token``: the identity of its token."""

    token: str
    name: str
    machine: str


class ApprovedMachine(msgspec.Struct, frozen=True, kw_only=True):
    approved: str


class EnrolmentService:
    """Creates and redeems tokens; runs where the keys are."""

    def __init__(
        self,
        records: EnrolmentRecords,
        trust: keyring.Keyring,
        machines: admission.MachineAdmission,
        *,
        lifetime_s: float | None = None,
    ) -> None:
        """``lifetime_s``: of the documents of machines that can renew them; None: they do not expire."""
        self._records = records
        self._trust = trust
        self._admission = machines
        self._lifetime_s = lifetime_s or None

    async def make(
        self,
        by: str,
        name: str,
        servers: tuple[str, ...],
        ca: str,
        *,
        locator: str = "",
        approval: bool,
        lifetime_s: float,
        machine_roles: tuple[str, ...] = (),
        chosen: bool = False,
    ) -> str:
        """``machine_roles``: of a machine of the domain, which may choose its name."""
        for url in servers:
            hosts.host_of_url(url, "address")
        if machine_roles:
            await asyncio.to_thread(self._admission.machines)
            if name:
                membership.check_name(name)
        else:
            subjects.identity(name)
            own_names.check(name, roles.Role.AGENT, of_machine=True)
            await asyncio.to_thread(self._refuse_issued_here, name)
        identity = PREFIX + secrets.token_hex(6)
        expires_at_s = time.time() + lifetime_s

        def issue() -> str:
            self._trust.issue(identity, roles.Role.JOINING, lifetime_s=lifetime_s + rows.ENROLMENT_KEPT_S)
            return self._trust.credentials(identity).render()

        creds = await asyncio.to_thread(issue)
        issued = rows.Enrolment(
            name=name, by=by, expires_at_s=expires_at_s, approved=not approval, roles=machine_roles
        )
        await self._records.set_enrolment(identity, issued, version=0)
        return EnrolmentToken(
            servers=servers,
            creds=creds,
            name=name,
            expires_at_s=expires_at_s,
            ca=ca,
            locator=locator,
            roles=machine_roles,
            chosen=chosen,
        ).render()

    async def waiting(self) -> list[WaitingMachine]:
        """Machines that requested admission and wait for approval."""
        return [
            WaitingMachine(token=row.token, name=row.enrolment.name, machine=row.enrolment.machine)
            for row in await self._unapproved()
            if row.enrolment.machine
        ]

    async def approve(self, name: str) -> ApprovedMachine:
        """Approve the machine that requested ``name``; several are distinguished by their tokens'
        identities.
        """
        unapproved = [row for row in await self._unapproved() if name in (row.token, row.enrolment.name)]
        requested = [row.token for row in unapproved if row.enrolment.machine]
        if len(requested) > 1:
            raise errors.Conflict(
                f"{len(requested)} machines requested the name {name!r}",
                hint=f"approve one of {', '.join(requested)}",
            )
        for row in unapproved:
            if not requested or row.token in requested:
                await self._update(row, approved=True)
                return ApprovedMachine(approved=row.enrolment.name)
        raise errors.NotFound(f"no machine waits for approval as {name!r}")

    async def _unapproved(self) -> list[rows.EnrolmentRow]:
        stored = await self._records.enrolments()
        return [row for row in stored if not row.enrolment.approved and not row.enrolment.spent]

    async def _update(self, row: rows.EnrolmentRow, **changes: Any) -> rows.EnrolmentRow:
        changed = msgspec.structs.replace(row.enrolment, **changes)
        if changed == row.enrolment:
            return row
        return await self._records.set_enrolment(row.token, changed, version=row.version)

    async def enrol(
        self,
        identity: str,
        public_key: str,
        machine: str,
        name: str = "",
        join: admission.JoinRequest | None = None,
    ) -> EnrolledMachine:
        """The document for a machine's key; `errors.Unavailable` while it waits for approval.

        ``name``: that of a machine which renews its document, now and later. ``join``: of a machine of the
        domain; its agent needs nothing else.
        """
        row = await self._records.enrolment(identity)
        if row is None:
            if not name:
                raise errors.Forbidden("unknown token", hint=NEW_TOKEN_HINT)
            return await asyncio.to_thread(self._admitted, identity, name, public_key)
        enrolment = row.enrolment
        if enrolment.public_key not in ("", public_key):
            used = (
                "is spent"
                if enrolment.spent
                else "was used by another machine, which is waiting for approval"
            )
            raise errors.Forbidden(f"this token {used}", hint=NEW_TOKEN_HINT)
        if bool(enrolment.roles) != (join is not None):
            raise errors.Forbidden(
                "this token is for " + ("`muster join`" if enrolment.roles else "`muster agent --join`")
            )
        if join is not None and enrolment.name not in ("", join.name):
            raise errors.Forbidden(f"this token is for the machine {enrolment.name!r}, not {join.name!r}")
        if join is not None and join.keys.get("bootstrap") != public_key:
            raise errors.Forbidden("the keys of the machine do not include that of its request")
        if enrolment.admitted and join is None:
            return await asyncio.to_thread(self._admitted, identity, enrolment.name, public_key)
        if enrolment.expires_at_s < time.time() and not enrolment.spent:
            raise errors.Forbidden("this token has expired", hint=NEW_TOKEN_HINT)
        nkeys.require_kind(public_key, nkeys.KeyKind.USER)
        if not enrolment.approved:
            await self._update(row, public_key=public_key, machine=machine[:64] or "?")
            raise errors.Unavailable(
                f"{enrolment.name} is waiting for approval", hint=f"`muster agent approve {enrolment.name}`"
            )
        # Stored first: from now on the token is valid for this key only.
        row = await self._update(row, public_key=public_key, spent=True)
        # The credentials of a forgotten agent end, so it returns to service before it has new ones.
        own_name = enrolment.name if join is None else join.name
        if any(agent.name == own_name for agent in await self._records.forgotten()):
            await self._records.undrain(own_name, "agent")
        if join is not None:
            joined = await asyncio.to_thread(self._admission.join, enrolment.roles, join)
            await self._update(row, admitted=True, name=join.name)
            return EnrolledMachine(join.name, "", joined=joined)
        admitted = await asyncio.to_thread(
            self._admit, identity, enrolment.name, public_key, self._lifetime_s if name else None
        )
        await self._update(row, admitted=True)
        return admitted

    def _admit(self, identity: str, name: str, public_key: str, lifetime_s: float | None) -> EnrolledMachine:
        replaced = False
        try:
            known = self._trust.show(name)
        except errors.NotFound:
            pass
        else:
            if known.role != roles.Role.AGENT:
                raise errors.Conflict(f"{name!r} has the role {known.role}, not agent")
            self._refuse_issued_here(name)
            if known.public_key == public_key:  # the domain ended before the admission was recorded
                # It may have replaced another one then, which brokers have not learnt.
                return msgspec.structs.replace(self._admitted(identity, name, public_key), replaced=True)
            self._trust.revoke(name, keep_free=RESERVED)
            replaced = True
        document = self._trust.issue(name, roles.Role.AGENT, public_key=public_key, lifetime_s=lifetime_s)
        return EnrolledMachine(name, document, replaced, self._current(identity, JOINING_S))

    def _refuse_issued_here(self, name: str) -> None:
        """An agent of the domain's own machines: the enrolment of another one would revoke its key."""
        try:
            known, issued = self._trust.show(name), self._trust.credentials(name)
        except errors.NotFound:
            return
        if known.status == "valid" and known.public_key == issued.claims.sub:
            raise errors.Conflict(
                f"{name!r} has credentials that this domain issued, as its own agents have",
                hint=f"choose another name; or, if that agent is gone, `muster creds revoke {name}`",
            )

    def _admitted(self, identity: str, name: str, public_key: str) -> EnrolledMachine:
        """The same reply again, or a renewed one, unless the machine was revoked or replaced since."""
        known = self._trust.show(name)
        if (known.role, known.public_key) != (roles.Role.AGENT, public_key) or known.status == "revoked":
            raise errors.Forbidden("this token is spent", hint=NEW_TOKEN_HINT)
        document = self._current(name, self._lifetime_s)
        return EnrolledMachine(name, document, joining=self._current(identity, JOINING_S))

    def _current(self, identity: str, lifetime_s: float | None) -> str:
        """The document of an identity, renewed if it expires and is due."""
        expires_at = self._trust.show(identity).expires_at
        left = lifetime_s and expires_at and (expires_at - self._trust.now_s) / lifetime_s
        if left is not None and left <= 1 - RENEW_AT:
            return self._trust.renew(identity, lifetime_s=lifetime_s)
        return self._trust.document(identity)


def machine_id() -> str:
    """Differs on a reinstalled machine."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            return pathlib.Path(path).read_text().strip()[:64]
    return ""


def machine_key(folder: pathlib.Path) -> nkeys.KeyPair:
    """The key for the enrolment, stored before its use: after a crash, the machine retries with the
    same key.
    """
    path = folder / _KEY
    try:
        return nkeys.KeyPair.from_seed(path.read_text().strip())
    except FileNotFoundError:
        key = nkeys.KeyPair.create(nkeys.KeyKind.USER)
        folder.mkdir(parents=True, exist_ok=True)
        files.write(path, key.seed.encode())
        return key


def write_credentials(
    folder: pathlib.Path, key: nkeys.KeyPair, document: str, joining: credentials.Credentials | None = None
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if joining is not None:
        files.write(folder / JOINING, joining.render().encode())
    files.write(folder / CREDENTIALS, credentials.Credentials(document, key.seed).render().encode())
    (folder / _KEY).unlink(missing_ok=True)


def renewal_s(folder: pathlib.Path, now_s: float) -> float | None:
    """The time until a machine has to renew its document; None: it cannot, or never has to."""
    claims = credentials.Credentials.load(folder / CREDENTIALS).claims
    if not claims.exp or not (folder / JOINING).exists():
        return None
    return max(0.0, claims.iat + RENEW_AT * (claims.exp - claims.iat) - now_s)
