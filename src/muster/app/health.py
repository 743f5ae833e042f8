"""/livez, /readyz and /metrics: how every process of Muster says how it is, through this one piece of code.

- ``/livez``: the process's event loop turns. A supervisor that gets no answer should restart it.
- ``/readyz``: 200 when it can do its work, else 503; the JSON body says how each of its parts is.
- ``/metrics``: OpenMetrics, or the classic Prometheus text for those who do not ask for it.

They ask nobody who they are: so they tell no secrets, and listen on loopback unless the settings differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from muster.app import team
from muster.bus import http
from muster.core import ground
from muster.core import metrics as metrics_


async def serve(
    settings: ground.Health,
    *,
    ready: Callable[[], bool],
    health: Callable[[], Mapping[str, team.Health]],
    metrics: metrics_.Metrics,
    also: Mapping[str, http.Handler] | None = None,
) -> http.Server | None:
    """The listening server, or None where the settings want none. ``also`` adds the process's own pages."""
    if not settings.enabled:
        return None

    def readyz(_: http.Request) -> http.Response:
        is_ready = ready()
        parts = {name: {"state": one.state.value, "reason": one.reason} for name, one in health().items()}
        return http.json_response({"ready": is_ready, "parts": parts}, 200 if is_ready else 503)

    def exposition(request: http.Request) -> http.Response:
        content_type, text = metrics.exposition(request.headers.get("accept", ""))
        return http.Response(200, text, content_type)

    routes: dict[str, http.Handler] = {
        "/livez": lambda _: http.text("ok\n"),
        "/readyz": readyz,
        "/metrics": exposition,
        **(also or {}),
    }
    return await http.serve(routes, settings.host, settings.port)
