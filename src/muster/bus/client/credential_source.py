"""The credentials of a connection, as the client needs them."""

from __future__ import annotations

import re
import ssl
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from muster.core import errors
from muster.core.telemetry import log

events = log.EventLog("bus")

_NONCE = re.compile(r"[A-Za-z0-9+/=_-]{8,256}")  # of a broker


class CredentialSource(Protocol):
    """The identity of a connection, and its proof. `muster.trust` implements it."""

    @property
    def identity(self) -> str: ...
    @property
    def user_jwt(self) -> str: ...
    @property
    def public_key(self) -> str: ...
    @property
    def sees_connections(self) -> bool:
        """Whether it may request the connections and subscriptions of its account from the brokers."""
        ...

    def answer(self, nonce: str) -> bytes:
        """The signature of the broker's challenge, in base 64."""
        ...

    def check_answer(self, public_key: str, nonce: str, answer: bytes) -> None:
        """Return if ``answer`` is that of the holder of the key; `errors.Unauthorized` otherwise."""
        ...


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """What a client of the brokers needs to connect to another process directly. ``creds`` may block."""

    creds: Callable[[], CredentialSource]
    tls: ssl.SSLContext | None


def login(
    server: str, load: Callable[[], CredentialSource] | None
) -> Callable[[Mapping[str, Any]], dict[str, str]]:
    """How a client logs in at the URL ``server`` and at brokers it reports: maps the INFO of a broker to
    fields of the CONNECT command."""
    parts = urllib.parse.urlsplit(server)
    current = load() if load is not None else None
    # Kept here, because the addresses of other brokers that this one reports have no password.
    user, password = urllib.parse.unquote(parts.username or ""), parts.password

    def fields(info: Mapping[str, Any]) -> dict[str, str]:
        nonlocal current
        if load is not None and current is not None and info.get("auth_required") and "nonce" in info:
            try:
                current = load()  # again for each attempt: they may have been renewed
            except errors.MusterError as error:  # unreadable now: those we have may still do
                events.warning("credentials-unreadable", error=error)
            nonce = str(info["nonce"])
            if _NONCE.fullmatch(nonce) is None:  # the signature may be valid elsewhere
                raise errors.Unauthorized(f"{nonce[:60]!r} is not the challenge of a broker")
            return {"jwt": current.user_jwt, "sig": current.answer(nonce).decode()}
        if password is not None:
            return {"user": user, "pass": urllib.parse.unquote(password)}
        return {"auth_token": user} if user else {}

    return fields
