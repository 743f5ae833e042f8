"""Callback addresses of clients: the settings must allow an address before it is called.

A request to an address that a client chooses could reach services that the client cannot: on this machine, or
in the network behind it.  So an address must match an entry of an allow-list: exactly in scheme and port, in
its host (``*.`` before a host: any name below it), and in the beginning of its path.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from muster.bus.http import server
from muster.core import errors

_PORTS = {"http": 80, "https": 443}
LENGTH_MAX = 2048


class HttpPost(Protocol):
    """The signature of `muster.bus.http.client.post`, so that tests can replace it."""

    def __call__(
        self, url: str, body: bytes, *, headers: dict[str, str], body_bytes_max: int
    ) -> Awaitable[server.HttpResponse]: ...


class CallbackNotAllowed(errors.Forbidden):
    code = "callback-not-allowed"


@dataclass(frozen=True, slots=True)
class _Place:
    scheme: str
    host: str
    port: int
    path: str


def check_entry(entry: str) -> None:
    """Validate an entry of the allow-list, when the settings are read."""
    _place(entry.replace("://*.", "://", 1))


def check(url: str, allowed: Sequence[str]) -> str:
    """Return ``url`` if it may be called."""
    place = _place(url)
    if not any(_covers(entry, place) for entry in allowed):
        raise CallbackNotAllowed(
            f"callbacks to {url[:200]!r} are not allowed",
            hint="the setting soap.callbacks lists those that are",
        )
    return url


def _covers(entry: str, place: _Place) -> bool:
    wildcard = "://*." in entry
    known = _place(entry.replace("://*.", "://", 1))
    if (known.scheme, known.port) != (place.scheme, place.port):
        return False
    if place.host != known.host if not wildcard else not place.host.endswith(f".{known.host}"):
        return False
    folder = known.path.rstrip("/")
    return place.path == known.path or place.path == folder or place.path.startswith(f"{folder}/")


def _place(url: str) -> _Place:
    try:
        if len(url) > LENGTH_MAX or not url.isascii() or any(c <= " " or c in '\\"<>^`{|}\x7f' for c in url):
            raise ValueError("invalid characters")
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError("it must begin with http:// or https:// and a host")
        if "@" in parts.netloc or parts.fragment:
            raise ValueError("it contains a user or a fragment")
        port = parts.port or _PORTS[parts.scheme]
        path = parts.path or "/"
        steps = urllib.parse.unquote(path).replace("\\", "/").split("/")
        if any(step.partition(";")[0] in (".", "..") for step in steps):  # some servers drop a ;parameter
            raise ValueError("its path contains dot segments")
    except ValueError as error:
        raise errors.InvalidInput(f"{url[:200]!r} is not a valid callback address: {error}") from error
    return _Place(parts.scheme, parts.hostname.rstrip("."), port, path)
