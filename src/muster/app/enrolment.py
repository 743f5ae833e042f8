"""How a machine comes into a domain: a one-time token for credentials whose key never leaves the machine.

A token holds where the brokers are, whom to believe, and the credentials of an identity that exists for one
question only: ``enrol``.  The machine makes a key, asks with its public half, and gets a document for the
name that the token was made for; the token is spent.  A machine that was set up anew asks under its old name:
the old key is revoked, so nothing speaks for it any more, and its resources are made anew.
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
from muster.trust import credentials, keyring, nkeys, roles

TOKENS = "manage.tokens"
PREFIX = "join-"
LIFETIME_S = 3600.0


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of a token holds. A secret, until it is spent."""

    servers: tuple[str, ...]
    creds: str
    name: str
    ca: str = ""
    locator: str = ""

    def render(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Token:
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(text.strip() + "=="), type=cls)
        except (ValueError, msgspec.MsgspecError) as error:
            raise errors.InvalidInput(
                "this is not a token", hint="`muster agent token NAME` makes one"
            ) from error


class Issued(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    by: str
    expires_at_s: float
    approved: bool
    spent: bool = False
    asked_by_machine: str = ""


class Desk:
    """Where tokens are made and spent; it runs where the keys are."""

    def __init__(self, store: database.Store, trust: keyring.Trust) -> None:
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

        def issue() -> str:
            self._trust.issue(identity, roles.Role.AGENT, lifetime_s=lifetime_s)
            return self._trust.credentials(identity).render()

        creds = await asyncio.to_thread(issue)
        issued = Issued(name=name, by=by, expires_at_s=time.time() + lifetime_s, approved=not approval)
        await self._store.put(TOKENS, identity, msgspec.json.encode(issued))
        return Token(servers=servers, creds=creds, name=name, ca=ca, locator=locator).render()

    async def waiting(self) -> list[dict[str, object]]:
        """Machines that have asked and wait for approval."""
        return [
            {"token": identity, "name": one.name, "machine": one.asked_by_machine}
            for identity, one in await self._all()
            if not one.approved and not one.spent and one.asked_by_machine
        ]

    async def approve(self, name: str) -> dict[str, str]:
        for identity, one in await self._all():
            if one.name == name and not one.approved and not one.spent:
                await self._put(identity, msgspec.structs.replace(one, approved=True))
                return {"approved": name}
        raise errors.NotFound(f"nobody waits to be approved as {name!r}")

    async def enrol(self, identity: str, public_key: str, machine: str) -> dict[str, str]:
        """The document for a machine's own key; `errors.Unavailable` while it waits for approval."""
        record = await self._store.get(TOKENS, identity)
        if record is None:
            raise errors.Forbidden("this token is not known")
        one = msgspec.json.decode(record.value, type=Issued)
        if one.spent or one.expires_at_s < time.time():
            raise errors.Forbidden(
                f"this token is {'spent' if one.spent else 'out of date'}: ask for another"
            )
        if not one.approved:
            await self._put(identity, msgspec.structs.replace(one, asked_by_machine=machine[:64] or "?"))
            raise errors.Unavailable(
                f"{one.name} waits for approval", hint=f"`muster agent approve {one.name}`"
            )
        # Spent first: if we end here, the token is lost, which is better than used twice.
        await self._put(identity, msgspec.structs.replace(one, spent=True), expected=record.version)

        def issue() -> str:
            try:
                known = self._trust.show(one.name)
            except errors.NotFound:
                pass
            else:
                if known.role != roles.Role.AGENT:
                    raise errors.Conflict(f"{one.name!r} has the role {known.role}, not agent")
                self._trust.revoke(one.name)
            document = self._trust.issue(one.name, roles.Role.AGENT, public_key=public_key)
            self._trust.revoke(identity)
            return document

        return {"name": one.name, "jwt": await asyncio.to_thread(issue)}

    async def _all(self) -> list[tuple[str, Issued]]:
        records = await self._store.scan(TOKENS)
        return [(record.key, msgspec.json.decode(record.value, type=Issued)) for record in records]

    async def _put(self, identity: str, one: Issued, expected: int | None = None) -> None:
        try:
            await self._store.put(TOKENS, identity, msgspec.json.encode(one), expected_version=expected)
        except store_api.Overtaken as error:
            raise errors.Conflict("this token is being used at the same time") from error


def write_credentials(path: pathlib.Path, key: nkeys.KeyPair, document: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, credentials.Credentials(document, key.seed).render().encode())
