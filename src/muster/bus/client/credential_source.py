"""The credentials of a connection, as the client needs them."""

from __future__ import annotations

from typing import Protocol


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
