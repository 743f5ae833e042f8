"""A real Alertmanager: it accepts our alerts, and its webhooks have the form of ours."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from muster.bus.http import client, server
from muster.core import errors, messages
from muster.pipeline.alerts import tracker, webhooks
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests import debian
from tests.pipeline import test_webhooks

CONFIG = """
route: {{receiver: team, group_by: [alertname], group_wait: 0s, group_interval: 1s}}
receivers: [{{name: team, webhook_configs: [{{url: "http://127.0.0.1:{port}/hook"}}]}}]
"""


def _form(value: Any) -> Any:
    """The names and types of a JSON value."""
    if isinstance(value, dict):
        return {key: _form(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_form(inner) for inner in value]
    return type(value).__name__


@pytest.mark.slow
async def test_alertmanager_accepts_our_alerts_and_sends_webhooks_like_ours(tmp_path: Path):
    debian.ALERTMANAGER.require()
    bodies: list[dict[str, Any]] = []

    def received(request: server.HttpRequest) -> server.HttpResponse:
        bodies.append(json.loads(request.body))
        return server.json_response({})

    listener = await server.serve({}, "127.0.0.1", 0, post_routes={"/hook": received})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "config.yml").write_text(CONFIG.format(port=listener.port))
    url = f"http://127.0.0.1:{port}"
    now_ms = time.time_ns() // 1_000_000
    firing = msgspec.structs.replace(
        test_webhooks.ALERT,
        since_ms=now_ms - 60_000,
        at_ms=now_ms,
        labels={"team": "web", "data-center": "north 1", "9": "nine", "empty": ""},
    )
    resolved = msgspec.structs.replace(firing, state=messages.AlertState.RESOLVED, acknowledged_by="ann")

    async def post(alert: messages.Alert) -> bool:
        sent = tracker.AlertNotification(alert, ("team",))
        data = webhooks.body("alertmanager-api", None, "team", sent, test_webhooks.secret)
        with contextlib.suppress(errors.Unavailable):
            answer = await client.post(
                f"{url}/api/v2/alerts", data, headers={"Content-Type": "application/json"}
            )
            assert answer.status == 200, answer.body
            return True
        return False

    try:
        async with await child_process.start(
            "prometheus-alertmanager",
            *(f"--config.file={tmp_path / 'config.yml'}", f"--storage.path={tmp_path / 'data'}"),
            *(f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="),
            name="alertmanager",
        ):
            await eventually(lambda: post(firing), timeout_s=60)
            await eventually(lambda: len(bodies) == 1, timeout_s=30)
            await post(resolved)
            await eventually(lambda: len(bodies) == 2, timeout_s=30)
    finally:
        await listener.close()
    for alert, theirs in zip((firing, resolved), bodies, strict=True):
        sent = tracker.AlertNotification(alert, ("team",))
        ours = json.loads(webhooks.body("alertmanager", None, "team", sent, test_webhooks.secret))
        assert _form(ours) == _form(theirs)
        for name in ("version", "status", "receiver", "groupKey", "groupLabels", "commonLabels"):
            assert ours[name] == theirs[name], name
        for name in ("status", "labels", "annotations", "startsAt"):
            assert ours["alerts"][0][name] == theirs["alerts"][0][name], name
