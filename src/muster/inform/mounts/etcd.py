"""etcd as a back end, over its JSON gateway: the keys under a prefix.

A value that is a JSON object gives its plain members as attributes, so that services registered by others
as JSON are found by predicates; any value is the attribute ``text`` too, where it is text.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

from muster.bus.http import client
from muster.core import errors
from muster.inform import protocol
from muster.inform.mounts import base

_TEXT_MAX = 1_000


class EtcdMount:
    def __init__(self, url: str, prefix: str = "", *, timeout_s: float = base.TIMEOUT_S) -> None:
        self._url = url.rstrip("/")
        self._prefix = prefix.encode()
        self._timeout_s = timeout_s

    async def entries(self) -> Sequence[base.MountedEntry]:
        return await self._range(self._prefix or b"\0", _end(self._prefix))

    async def entry(self, key: str) -> base.MountedEntry | None:
        if not key.encode().startswith(self._prefix):
            return None
        entries = await self._range(key.encode(), None)
        return entries[0] if entries else None

    async def _range(self, first: bytes, end: bytes | None) -> list[base.MountedEntry]:
        question: dict[str, Any] = {"key": _encoded(first), "limit": str(base.ENTRIES_MAX)}
        if end is not None:
            question["range_end"] = _encoded(end)
        answer = await client.post(
            f"{self._url}/v3/kv/range",
            json.dumps(question).encode(),
            headers={"Content-Type": "application/json"},
            timeout_s=self._timeout_s,
        )
        if answer.status != 200:
            raise errors.Unavailable(f"etcd at {self._url} says {answer.status}: {answer.body[:120]!r}")
        try:
            return [_found(pair) for pair in answer.json().get("kvs", ())]
        except (AttributeError, KeyError, TypeError, ValueError, binascii.Error) as error:
            raise errors.Unavailable(f"what answers at {self._url} is no etcd: {error}") from error


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _end(prefix: bytes) -> bytes:
    """The first key behind all that begin so, as etcd wants it; zero: no end."""
    for place in range(len(prefix) - 1, -1, -1):
        if prefix[place] < 0xFF:
            return prefix[:place] + bytes([prefix[place] + 1])
    return b"\0"


def _found(pair: dict[str, Any]) -> base.MountedEntry:
    value = base64.b64decode(pair.get("value", ""))
    key = base64.b64decode(pair["key"]).decode(errors="replace")
    revision = int(pair.get("mod_revision", 0))
    if not 0 <= revision < 1 << 63:
        raise ValueError(f"a revision of {revision}")
    return base.MountedEntry(key, value, _attributes(value), revision)


def _attributes(value: bytes) -> protocol.Attributes:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return {}
    attributes: protocol.Attributes = {"text": text[:_TEXT_MAX]}
    try:
        members = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or brackets without end
        return attributes
    if isinstance(members, dict):
        attributes |= {name: member for name, member in members.items() if _is_attribute(name, member)}
    return attributes


def _is_attribute(name: str, member: Any) -> bool:
    """JSON may say what no message of ours can: half a character, a number of any length."""
    if isinstance(member, list):
        if not all(isinstance(each, str) for each in member):
            return False
    elif not isinstance(member, str | int | float | bool):
        return False
    try:
        protocol.encode((name, member))
    except errors.InvalidInput:
        return False
    return True
