"""The form of secrets: sealed boxes, and the references to them in configurations. Pure.

A user seals the value for the domain's secret key, so it is encrypted on the bus, in the store and in
backups. A manifest refers to it as ``{secret: "store:NAME"}``. An agent that starts a resource requests the
secret with a one-time key. The registry checks that this agent hosts the resource and that the configuration
of the resource refers to the secret, and seals the value for that key. No other identity can read a value:
operators can replace and delete secrets, but not read them.  `registry.secret_store` has the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

STORE = "store:"


class SealedSecret(msgspec.Struct, frozen=True, kw_only=True):
    """The stored record. ``box`` opens only with the domain's key of secrets."""

    box: str
    by: str
    at_ms: int


def storage_context(name: str) -> str:
    """The context of a box in the store."""
    return f"stored/{name}"


def delivery_context(agent: str, resource: str, name: str) -> str:
    """The context of a box for an agent."""
    return f"delivered/{agent}/{resource}/{name}"


def references(config: Any) -> Iterator[str]:
    """Names of the stored secrets that a configuration refers to."""
    inside: Any = ()
    if isinstance(config, dict):
        reference = config.get("secret")
        if isinstance(reference, str) and reference.startswith(STORE):
            yield reference.removeprefix(STORE)
        inside = config.values()
    elif isinstance(config, list | tuple):
        inside = config
    for value in inside:
        yield from references(value)
