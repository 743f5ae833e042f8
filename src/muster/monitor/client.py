"""What others call: find producers, read the latest reports, push a service report from an application.

    from muster.monitor import client

    client.push("shop", {"orders_s": 12.5})

A producer is found in the registry, and then listened to where it says: that is the GMA model.
"""

from __future__ import annotations

import http.client
import os
import urllib.parse
from collections.abc import Mapping

import msgspec

from muster.bus import api
from muster.core import errors, health, messages
from muster.monitor import protocol

SENSOR_VARIABLE = "MUSTER_SENSOR"
SENSOR_URL = "http://127.0.0.1:9125"
PUSH_TIMEOUT_S = 2.0


def push(
    service: str,
    metrics: Mapping[str, float],
    *,
    state: str = "up",
    reason: str = "",
    period_s: float = 10.0,
    url: str | None = None,
) -> None:
    """Tell the sensor of this machine how a service is. Blocking, for a moment; no bus is needed.

    ``url``: the sensor's, otherwise what ``MUSTER_SENSOR`` says, otherwise its usual place on loopback.
    """
    try:
        report = messages.ServiceReport(
            name=service, state=health.State(state), reason=reason, metrics=dict(metrics)
        )
    except ValueError:
        known = ", ".join(one.value for one in health.State)
        raise errors.InvalidInput(f"no state {state[:40]!r}: one of {known}") from None
    address = url or os.environ.get(SENSOR_VARIABLE) or SENSOR_URL
    host = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(host.hostname or "", host.port or 80, timeout=PUSH_TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/report?period={period_s:g}s", msgspec.json.encode(report), headers)
        answer = connection.getresponse()
        text = answer.read(1000).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise errors.Unavailable(
            f"no sensor answers at {address}: {error}", hint=f"start one, or set {SENSOR_VARIABLE}"
        ) from error
    finally:
        connection.close()
    if answer.status != 200:
        raise errors.InvalidInput(f"the sensor refused it: {text}")


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
