"""/readyz and /metrics: failures of supervised background tasks, and refused messages."""

from __future__ import annotations

import asyncio
import os
import types
from collections import Counter

from muster.bus.http import client, health
from muster.bus.http import server as http_server
from muster.bus.rpc import requests
from muster.core.settings import domain
from muster.core.telemetry import metrics
from muster.supervision import tasks
from muster.testing.eventually import eventually

GAUGE = "muster_asyncio_tasks "


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


async def test_metrics_have_the_messages_that_services_refused():
    message = types.SimpleNamespace(subject="muster.lamps.from.eve.request.switch", reply="_R.app.ann.s.1")
    assert requests.accept(message, "muster.lamps.from.*.request.switch", Counter()) is None
    async with health.serve_process(
        domain.HealthSettings(), process="p", conditions=dict, metrics=metrics.Metrics()
    ) as server:
        assert server is not None
        exposition = (await client.get(f"{server.url}/metrics")).body.decode()
    assert 'muster_refused_messages_total{reason="reply",service="lamps"} 1.0' in exposition


async def test_metrics_have_the_number_of_tasks_of_the_event_loop():
    async with health.serve_process(
        domain.HealthSettings(), process="p", conditions=dict, metrics=metrics.Metrics()
    ) as server:
        assert server is not None

        async def tasks_shown() -> float:
            exposition = (await client.get(f"{server.url}/metrics")).body.decode()
            return float(next(line.split()[1] for line in exposition.splitlines() if line.startswith(GAUGE)))

        before = await tasks_shown()
        waiting = [asyncio.create_task(asyncio.Event().wait()) for _ in range(50)]
        assert await tasks_shown() >= before + 45  # connections come and go
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_blocking_request_works_beside_a_running_event_loop():
    async with health.serve_process(
        domain.HealthSettings(), process="p", conditions=dict, metrics=metrics.Metrics()
    ) as server:
        assert server is not None
        response = await asyncio.to_thread(client.post_blocking, f"{server.url}/livez", b"", headers={})
        assert response.status == 405


async def test_a_reader_of_old_addresses_does_not_remove_those_of_a_successor(tmp_path, monkeypatch):
    """A process that is replaced while its address is read; without address the successor would be killed."""
    async with await http_server.serve({}, "127.0.0.1", 0) as server:
        with monkeypatch.context() as former:
            former.setattr(os, "getpid", lambda: 1 << 30)
            health.advertise(tmp_path, "manager-1", server)

        def is_running(pid: int) -> bool:
            if pid == os.getpid():
                return True
            with monkeypatch.context() as ready:
                ready.setattr(health, "_is_running", lambda _: True)
                health.advertise(tmp_path, "manager-1", server)
            return False

        monkeypatch.setattr(health, "_is_running", is_running)
        list(health.advertised(tmp_path))
        assert [endpoint.pid for endpoint in health.advertised(tmp_path)] == [os.getpid()]
        assert len(list(tmp_path.iterdir())) == 1
