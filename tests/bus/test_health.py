"""/readyz and /metrics show failures of supervised background tasks."""

from __future__ import annotations

import asyncio

from muster.bus.http import client, health
from muster.core.settings import domain
from muster.core.telemetry import metrics
from muster.supervision import tasks
from muster.testing.eventually import eventually


async def test_a_failed_task_makes_the_process_not_ready_and_is_counted():
    supervisor = tasks.TaskSupervisor("health test")
    measured = metrics.Metrics()

    async def fail() -> None:
        raise OSError("no disk")

    async with health.serve_process(
        domain.HealthSettings(), process="p", conditions=dict, metrics=measured
    ) as server:
        assert server is not None
        ready = await client.get(f"{server.url}/readyz")
        assert ready.status == 200
        assert ready.json()["parts"] == {"tasks": {"state": "up", "reason": ""}}

        supervisor.loop("work", fail, on_failure=tasks.OnFailure.FATAL)
        await eventually(lambda: supervisor.fatal is not None)
        ready = await client.get(f"{server.url}/readyz")
        assert ready.status == 503
        assert ready.json()["parts"]["tasks"] == {
            "state": "failed",
            "reason": "health test: OSError: no disk",
        }
        exposition = (await client.get(f"{server.url}/metrics")).body.decode()
        assert 'muster_task_failures_total{owner="health test",task="work"} 1.0' in exposition

        await supervisor.close()
        assert (await client.get(f"{server.url}/readyz")).status == 200


async def test_a_blocking_request_works_beside_a_running_event_loop():
    async with health.serve_process(
        domain.HealthSettings(), process="p", conditions=dict, metrics=metrics.Metrics()
    ) as server:
        assert server is not None
        response = await asyncio.to_thread(client.post_blocking, f"{server.url}/livez", b"", headers={})
        assert response.status == 405
