"""How a machine comes into a domain: a one-time token for credentials whose key never leaves the machine.

A token holds where the brokers are, which certificates to trust, and the credentials of an identity that may
do nothing but ask to be admitted (the role ``joining``).  The machine makes a key, asks with its public half,
and gets a document for the name that the token was made for; the token is spent.  From the first request on,
the token belongs to that key: a request that is repeated, because its answer was lost, gets the same answer,
and what an operator approves is the machine that asked.

A machine that was set up anew asks under its old name: the old key is revoked, so no process can act for it
any more, and its resources are created anew.
"""

from __future__ import annotations

import asyncio
import base64
import pathlib
import secrets
import time

import msgspec

from muster.core import errors, files, subjects
from muster.store import api as store_api
from muster.store import database
from muster.trust import credentials, keyring, nkeys
from muster.trust.permissions import roles

TOKENS = "manage.tokens"
_KEY = "joining.seed"
ANOTHER = "ask for another: `muster agent token NAME`"
PREFIX = "join-"
LIFETIME_S = 3600.0
ANSWERED_S = 7 * 86400.0  # for so long after its end a token is told why it is not accepted


class EnrolmentToken(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of a token holds. A secret, until it is spent."""

    servers: tuple[str, ...]
    creds: str
    name: str
    expires_at_s: float
    ca: str = ""
    locator: str = ""

    @property
    def has_expired(self) -> bool:
        return self.expires_at_s < time.time()

    def render(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> EnrolmentToken:
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(text.strip() + "=="), type=cls)
        except (ValueError, msgspec.MsgspecError) as error:
            raise errors.InvalidInput(
                "this is not a token", hint="`muster agent token NAME` makes one"
            ) from error


class EnrolmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    by: str
    expires_at_s: float
    approved: bool
    spent: bool = False
    admitted: bool = False  # what it was spent for was done
    asked_by_machine: str = ""
    public_key: str = ""  # of the machine that asked first


class Admission(msgspec.Struct, frozen=True):
    """``replaced``: a former key of the same name was revoked, which brokers have to be told."""

    name: str
    jwt: str
    replaced: bool = False


class EnrolmentService:
    """Where tokens are made and spent; it runs where the keys are."""

    def __init__(self, store: database.Store, trust: keyring.Keyring) -> None:
        self._store = store
        self._trust = trust

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
    ) -> str:
        subjects.identity(name)
        identity = PREFIX + secrets.token_hex(6)
        expires_at_s = time.time() + lifetime_s

        def issue() -> str:
            self._trust.issue(identity, roles.Role.JOINING, lifetime_s=lifetime_s + ANSWERED_S)
            return self._trust.credentials(identity).render()

        creds = await asyncio.to_thread(issue)
        issued = EnrolmentRecord(name=name, by=by, expires_at_s=expires_at_s, approved=not approval)
        await self._put(identity, issued)
        await self._forget_old()
        return EnrolmentToken(
            servers=servers, creds=creds, name=name, expires_at_s=expires_at_s, ca=ca, locator=locator
        ).render()

    async def waiting(self) -> list[dict[str, str]]:
        """Machines that have asked and wait for approval."""
        return [
            {"token": identity, "name": one.name, "machine": one.asked_by_machine}
            for identity, one in await self._all()
            if not one.approved and not one.spent and one.asked_by_machine
        ]

    async def approve(self, name: str) -> dict[str, str]:
        """The machine that asked as ``name``; several that did are told apart by their tokens' identities."""
        unapproved = [
            (identity, one)
            for identity, one in await self._all()
            if name in (identity, one.name) and not one.approved and not one.spent
        ]
        asked = [identity for identity, one in unapproved if one.asked_by_machine]
        if len(asked) > 1:
            raise errors.Conflict(
                f"{len(asked)} machines ask to be {name!r}", hint=f"approve one of {', '.join(asked)}"
            )
        for identity, one in unapproved:
            if not asked or identity in asked:
                await self._put(identity, msgspec.structs.replace(one, approved=True))
                return {"approved": one.name}
        raise errors.NotFound(f"no machine waits to be approved as {name!r}")

    async def enrol(self, identity: str, public_key: str, machine: str) -> Admission:
        """The document for a machine's own key; `errors.Unavailable` while it waits for approval."""
        record = await self._store.get(TOKENS, identity)
        if record is None:
            raise errors.Forbidden("this token is not known", hint=ANOTHER)
        one = msgspec.json.decode(record.value, type=EnrolmentRecord)
        if one.public_key not in ("", public_key):
            used = "is spent" if one.spent else "was used by another machine, which waits for approval"
            raise errors.Forbidden(f"this token {used}", hint=ANOTHER)
        if one.admitted:
            return await asyncio.to_thread(self._admitted, one.name, public_key)
        if one.expires_at_s < time.time():
            raise errors.Forbidden("this token has expired", hint=ANOTHER)
        nkeys.require_kind(public_key, nkeys.KeyKind.USER)
        one = msgspec.structs.replace(one, public_key=public_key)
        if not one.approved:
            one = msgspec.structs.replace(one, asked_by_machine=machine[:64] or "?")
            await self._put(identity, one, expected=record.version)
            raise errors.Unavailable(
                f"{one.name} waits for approval", hint=f"`muster agent approve {one.name}`"
            )
        # Stored first: from here on the token is good for this key only, however often it asks.
        one = msgspec.structs.replace(one, spent=True)
        await self._put(identity, one, expected=record.version)
        admitted = await asyncio.to_thread(self._admit, one.name, public_key)
        await self._put(identity, msgspec.structs.replace(one, admitted=True))
        return admitted

    def _admit(self, name: str, public_key: str) -> Admission:
        replaced = False
        try:
            known = self._trust.show(name)
        except errors.NotFound:
            pass
        else:
            if known.role != roles.Role.AGENT:
                raise errors.Conflict(f"{name!r} has the role {known.role}, not agent")
            if known.public_key == public_key:  # the domain ended before it was recorded
                return self._admitted(name, public_key)
            self._trust.revoke(name)
            replaced = True
        return Admission(name, self._trust.issue(name, roles.Role.AGENT, public_key=public_key), replaced)

    def _admitted(self, name: str, public_key: str) -> Admission:
        """The same answer again, unless the machine was shut out or replaced since."""
        known = self._trust.show(name)
        if known.public_key != public_key or known.status != "valid":
            raise errors.Forbidden("this token is spent", hint=ANOTHER)
        return Admission(name, self._trust.document(name))

    async def _forget_old(self) -> None:
        """Tokens whose identities have expired: brokers refuse them, so they cannot ask any more."""
        for identity, one in await self._all():
            if one.expires_at_s + ANSWERED_S < time.time():
                await self._store.delete(TOKENS, identity)

    async def _all(self) -> list[tuple[str, EnrolmentRecord]]:
        records = await self._store.scan(TOKENS)
        return [(record.key, msgspec.json.decode(record.value, type=EnrolmentRecord)) for record in records]

    async def _put(self, identity: str, one: EnrolmentRecord, expected: int | None = None) -> None:
        try:
            await self._store.put(TOKENS, identity, msgspec.json.encode(one), expected_version=expected)
        except store_api.TransactionConflict as error:
            raise errors.Conflict("this token is being used at the same time") from error


def machine_key(folder: pathlib.Path) -> nkeys.KeyPair:
    """The key to enrol with, stored before it is used: a machine that crashes asks again with the same."""
    path = folder / _KEY
    try:
        return nkeys.KeyPair.from_seed(path.read_text().strip())
    except FileNotFoundError:
        key = nkeys.KeyPair.create(nkeys.KeyKind.USER)
        folder.mkdir(parents=True, exist_ok=True)
        files.write(path, key.seed.encode())
        return key


def write_credentials(folder: pathlib.Path, key: nkeys.KeyPair, document: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / "agent.creds", credentials.Credentials(document, key.seed).render().encode())
    (folder / _KEY).unlink(missing_ok=True)
