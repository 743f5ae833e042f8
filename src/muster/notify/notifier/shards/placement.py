"""Placement of shards on notifiers: highest random weight, so few shards move when notifiers change."""

from __future__ import annotations

import zlib
from collections.abc import Collection

from muster.notify import protocol


def holder_of(shard: protocol.Shard, notifiers: Collection[str]) -> str:
    return max(notifiers, key=lambda name: (zlib.crc32(f"{shard}:{name}".encode()), name))
