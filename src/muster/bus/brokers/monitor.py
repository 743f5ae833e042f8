"""Requests to a running broker over its monitor port on loopback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muster.bus.http import client
from muster.core import errors

TIMEOUT_S = 2.0
SILENT_S = 3.0  # a broker whose health page does not reply for this long is frozen
CONFIRM_S = 1.0  # for a second request, in case that this process was the one that stood still


@dataclass(frozen=True, slots=True)
class BrokerHealth:
    ok: bool
    reason: str = ""  # text of the server
    silent: bool = False  # it did not reply, although the request could be sent


async def get_monitor(url: str, page: str, *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Read a page of the server (``varz``, ``connz``, ``routez``, ``gatewayz``, ``leafz``, ``jsz?…``)."""
    response = await client.get(f"{url}/{page}", timeout_s=timeout_s)
    if response.status != 200:
        raise errors.Unavailable(
            f"{url}/{page} returned HTTP status {response.status}: {response.body[:200]!r}"
        )
    answer = response.json()
    if not isinstance(answer, dict):
        raise errors.Unavailable(f"{url}/{page} did not return a JSON object")
    return answer


async def responds(url: str) -> bool:
    """Whether the broker replies at all."""
    for timeout_s in (SILENT_S, CONFIRM_S):
        if not (await health(url, timeout_s=timeout_s)).silent:
            return True
    return False


async def health(url: str, query: str = "js-meta-only=true", *, timeout_s: float = TIMEOUT_S) -> BrokerHealth:
    """The health that the broker reports; a broker that does not respond is not healthy."""
    try:
        response = await client.get(f"{url}/healthz?{query}", timeout_s=timeout_s)
        answer = response.json()
    except errors.MusterError as error:
        return BrokerHealth(
            False, error.message, silent=isinstance(error.__cause__, TimeoutError | ConnectionError)
        )
    return BrokerHealth(response.status == 200, str(answer.get("error", "")))
