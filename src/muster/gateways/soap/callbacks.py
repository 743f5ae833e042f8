"""Addresses that clients give us to call: none is ever called unless the settings allow it.

A request that we send to an address of a stranger's choice reaches what the stranger cannot: services of our
own machine, or of the network behind it.  So an address must match an entry of a list, exactly in scheme and
port, in its host (``*.`` before a host: any name below it), and in the beginning of its path.

Pure.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from muster.core import errors

_PORTS = {"http": 80, "https": 443}
LENGTH_MAX = 2048


class CallbackNotAllowed(errors.Forbidden):
    code = "callback-not-allowed"


@dataclass(frozen=True, slots=True)
class _Place:
    scheme: str
    host: str
    port: int
    path: str


def check_entry(entry: str) -> None:
    """An entry of the list itself, when the settings are read."""
    _place(entry.replace("://*.", "://", 1))


def check(url: str, allowed: Sequence[str]) -> str:
    """``url`` itself, if it may be called."""
    place = _place(url)
    if not any(_covers(entry, place) for entry in allowed):
        raise CallbackNotAllowed(
            f"the address {url[:200]!r} may not be called", hint="the settings list the callbacks that may be"
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
            raise ValueError("characters that no address has")
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError("it begins with neither http:// nor https:// and a host")
        if "@" in parts.netloc or parts.fragment:
            raise ValueError("a user or a fragment in it")
        port = parts.port or _PORTS[parts.scheme]
        path = parts.path or "/"
        steps = urllib.parse.unquote(path).replace("\\", "/").split("/")
        if ".." in steps or "." in steps:
            raise ValueError("a path with dots")
    except ValueError as error:
        raise errors.InvalidInput(f"{url[:200]!r} is no address that could be called: {error}") from error
    return _Place(parts.scheme, parts.hostname.rstrip("."), port, path)
