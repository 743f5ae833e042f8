"""What others call: find producers, read the latest reports, push a service report from an application.

    from muster.monitor import client
    await client.push("http://127.0.0.1:9125", "shop", {"orders_s": 12.5})

A producer is found in the registry, and then listened to where it says: that is the GMA model.
"""

from __future__ import annotations

from muster.bus import api
from muster.core import errors, messages
from muster.monitor import protocol


async def find(
    bus: api.Bus, *, group: str | None = None, level: int | None = None, produces: str | None = None
) -> list[protocol.Producer]:
    """Producers of the domain, by what they carry; those of the highest level first."""
    registry = await bus.key_value(api.KeyValueSettings(bucket=protocol.BUCKET))
    found = []
    for key in await registry.keys("producer.>"):
        entry = await registry.get(key)
        if entry is None or entry.value is None:
            continue
        try:
            producer = messages.decode(entry.value, protocol.Producer)
        except errors.InvalidInput:
            continue  # of a version that this does not know
        if (
            (group is None or group in producer.groups)
            and (level is None or level == producer.level)
            and (produces is None or produces == producer.produces)
        ):
            found.append(producer)
    return sorted(found, key=lambda one: (-one.level, one.name))
