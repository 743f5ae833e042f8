"""The origin of an operation: a gateway states it with the requests that it sends for a user, and services
record it.

The gateway uses the identity of the user, so the audit record of the service names the user; the interface
and the address come from here. They are claims of the sender.

    with origin.acting("rest", "10.0.0.1") as begun:
        await client.call(…)
    begun.answered   # a service carried a request out, or refused it, and has recorded that
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

from muster.bus import api

HEADER = "Muster-Origin"  # an interface and an address


@dataclass(slots=True)
class ActOrigin:
    interface: str
    address: str = ""
    answered: bool = False


_current: contextvars.ContextVar[ActOrigin | None] = contextvars.ContextVar("origin", default=None)


@contextlib.contextmanager
def acting(interface: str, address: str = "") -> Iterator[ActOrigin]:
    """Requests that are sent inside state this origin."""
    begun = ActOrigin(interface, address)
    token = _current.set(begun)
    try:
        yield begun
    finally:
        _current.reset(token)


def headers() -> dict[str, str]:
    begun = _current.get()
    return {} if begun is None else {HEADER: f"{begun.interface} {begun.address}"}


def answered() -> None:
    """A service has replied to a request that changes something."""
    begun = _current.get()
    if begun is not None:
        begun.answered = True


def details(message: api.Message) -> dict[str, str]:
    """For the audit record of a request."""
    interface, _, address = (message.header(HEADER) or "")[:256].partition(" ")
    return {name: value for name, value in (("interface", interface), ("address", address)) if value}
