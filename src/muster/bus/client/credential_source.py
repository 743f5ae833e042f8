"""The credentials of a connection, as the client needs them."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from typing import Any, Protocol

from muster.core import errors
from muster.core.telemetry import log

events = log.EventLog("bus")


class CredentialSource(Protocol):
    """The identity of a connection, and its proof. `muster.trust` implements it."""

    @property
    def identity(self) -> str: ...
    @property
    def user_jwt(self) -> str: ...
    @property
    def sees_connections(self) -> bool:
        """Whether it may request the connections and subscriptions of its account from the brokers."""
        ...

    def answer(self, nonce: str) -> bytes:
        """The signature of the broker's challenge, in base 64."""
        ...


def login_options(server: str, load: Callable[[], CredentialSource] | None) -> dict[str, Any]:
    """The options of nats-py with which a client logs in at the URL ``server``, and at brokers it reports."""
    options: dict[str, Any] = {}
    if load is not None:
        current = load()

        def sign(nonce: str) -> bytes:
            nonlocal current
            try:
                current = load()  # again for each attempt: they may have been renewed
            except errors.MusterError as error:  # unreadable now: those we have may still do
                events.warning("credentials-unreadable", error=error)
            return current.answer(nonce)

        # nats-py requests the signature first, so the JWT is from the same reading.
        options.update(signature_cb=sign, user_jwt_cb=lambda: current.user_jwt.encode())
    try:
        parts = urllib.parse.urlsplit(server)
    except ValueError as error:
        raise errors.InvalidInput(f"{server[:200]!r} is not the URL of a broker: {error}") from error
    if parts.password is not None:
        # As options, because the URLs of other brokers that this one reports have no password.
        options.update(
            user=urllib.parse.unquote(parts.username or ""), password=urllib.parse.unquote(parts.password)
        )
    return options
