"""Which notifier holds which shard: highest random weight, so that few shards move when one comes or goes."""

from __future__ import annotations

import zlib
from collections.abc import Collection

from muster.notify import protocol


def holder_of(shard: protocol.Shard, notifiers: Collection[str]) -> str:
    return max(notifiers, key=lambda name: (zlib.crc32(f"{shard}:{name}".encode()), name))
