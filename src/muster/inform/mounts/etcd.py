"""etcd as a back end, over its JSON gateway: the keys under a prefix.

If a value is a JSON object, its scalar members and lists of texts become attributes, so predicates find
services that others register as JSON.  Every value that is text is also the attribute ``text``.
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
        request: dict[str, Any] = {"key": _encoded(first), "limit": str(base.ENTRIES_MAX)}
        if end is not None:
            request["range_end"] = _encoded(end)
        response = await client.post(
            f"{self._url}/v3/kv/range",
            json.dumps(request).encode(),
            headers={"Content-Type": "application/json"},
            timeout_s=self._timeout_s,
        )
        if response.status != 200:
            raise errors.Unavailable(
                f"etcd at {self._url} responded with {response.status}: {response.body[:120]!r}"
            )
        try:
            return [_entry(pair) for pair in response.json().get("kvs", ())]
        except (AttributeError, KeyError, TypeError, ValueError, binascii.Error) as error:
            raise errors.Unavailable(f"the server at {self._url} is not etcd: {error}") from error


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _end(prefix: bytes) -> bytes:
    """The end of the key range with this prefix in etcd's form; zero: no end."""
    for place in range(len(prefix) - 1, -1, -1):
        if prefix[place] < 0xFF:
            return prefix[:place] + bytes([prefix[place] + 1])
    return b"\0"


def _entry(pair: dict[str, Any]) -> base.MountedEntry:
    value = base64.b64decode(pair.get("value", ""))
    key = base64.b64decode(pair["key"]).decode(errors="replace")
    revision = int(pair.get("mod_revision", 0))
    if not 0 <= revision < 1 << 63:
        raise ValueError(f"invalid revision {revision}")
    return base.MountedEntry(key, value, _attributes(value), revision)


def _attributes(value: bytes) -> protocol.Attributes:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return {}
    attributes: protocol.Attributes = {"text": text[:_TEXT_MAX]}
    try:
        members = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return attributes
    if isinstance(members, dict):
        attributes |= {name: member for name, member in members.items() if _is_attribute(name, member)}
    return attributes


def _is_attribute(name: str, member: Any) -> bool:
    """Whether a member can be encoded: JSON allows lone surrogates and integers of any size."""
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
