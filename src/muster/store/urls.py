"""Store URLs: ``sqlite:PATH``, ``sqlite::memory:`` or ``postgresql://USER@HOST:PORT/DATABASE``."""

from __future__ import annotations

import pathlib
import urllib.parse

import msgspec

from muster.core import errors

_HINT = "write sqlite:PATH, sqlite::memory: or postgresql://USER@HOST:PORT/DATABASE"


class SqliteUrl(msgspec.Struct, frozen=True):
    """``path`` None: for this process only, deleted when it is closed."""

    path: pathlib.Path | None


class PostgresUrl(msgspec.Struct, frozen=True):
    """``conninfo`` is the URL for the driver; ``shown`` is without secrets, for logs and messages."""

    conninfo: str
    shown: str


def parse(url: str, folder: pathlib.Path | None = None) -> SqliteUrl | PostgresUrl:
    """A relative path is relative to ``folder``."""
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in ("sqlite", "postgresql", "postgres"):
        raise errors.InvalidInput(f"{scheme[:40]!r} is not an engine that can hold a store", hint=_HINT)
    if scheme == "sqlite":
        if rest.startswith("//"):
            raise errors.InvalidInput(f"{url[:120]!r}: sqlite: is followed by a path, without //", hint=_HINT)
        if not rest or "\0" in rest:
            raise errors.InvalidInput("sqlite: needs the path of a file", hint=_HINT)
        return SqliteUrl(None if rest == ":memory:" else (folder or pathlib.Path()) / rest)
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise errors.InvalidInput(f"not a postgresql:// URL: {error}", hint=_HINT) from error
    if not rest.startswith("//"):
        raise errors.InvalidInput("a postgresql address begins with postgresql://", hint=_HINT)
    host = f"{parts.hostname or ''}{f':{port}' if port else ''}"
    user = f"{parts.username}@" if parts.username else ""
    return PostgresUrl(url, f"postgresql://{user}{host}{parts.path}")
