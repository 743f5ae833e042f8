"""Hosts, ports and URLs as settings name them."""

from __future__ import annotations

import re
from typing import Annotated
from urllib import parse

import msgspec

from muster.core import errors

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|::1|\[::1\])\Z")


def is_loopback(host: str) -> bool:
    return bool(_LOOPBACK.match(host))


def of_url(url: str, field: str) -> tuple[str, int | None]:
    """The host and the port that a URL names; `errors.InvalidInput` if there can be none such."""
    try:
        parts = parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise errors.InvalidInput(f"{field}: {url[:200]!r} is no URL: {error}") from error
    if not host:
        raise errors.InvalidInput(f"{field}: {url[:200]!r} names no host")
    return host, port


def without_password(url: str, field: str, instead: str) -> None:
    """Refuse a URL that holds a password: it would be printed, logged and saved in the clear."""
    try:
        password = parse.urlsplit(url).password
    except ValueError as error:
        raise errors.InvalidInput(f"{field}: not a URL: {error}") from error
    if password is not None:
        raise errors.InvalidInput(f"{field}: a URL must not hold a password; {instead}")
