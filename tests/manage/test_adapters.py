"""Every adapter that can run here, under the contract; and what is particular to each."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from muster.bus import http
from muster.core import health, messages
from muster.manage.adapters import base, catalogue
from muster.testing.eventually import eventually
from tests.manage import contract


class TestProcess(contract.Contract):
    type_name = "process"
    restarts_alone = True

    @pytest.fixture
    def config(self):
        return {"command": ["sleep", "1000"]}

    @pytest.fixture
    def other(self, config):
        return {"command": ["sleep", "2000"]}

    async def break_it(self, host):
        os.kill(self.seen(host).properties["pid"], signal.SIGKILL)
        return True

    async def test_output_is_kept_and_secrets_are_resolved(self, host, tmp_path):
        (tmp_path / "key").write_text("swordfish\n")
        config = {
            "command": ["sh", "-c", "echo $KEY; sleep 1000"],
            "environment": {"KEY": {"secret": f"file:{tmp_path / 'key'}"}},
        }
        await self.do(host, "create", config=config)

        async def written():
            return "swordfish" in (await self.do(host, "execute", operation="logs")).result

        await eventually(written)
        assert "swordfish" not in (tmp_path / "hosted" / "thing.json").read_text()

    async def test_health_by_port(self, host, tmp_path):
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        check = {"kind": "port", "port": port, "every_s": 0.05, "failures": 1}
        await self.do(host, "create", config={"command": ["sleep", "1000"], "health": check})
        await eventually(lambda: self.seen(host).state is health.State.UP)
        server.close()
        await server.wait_closed()
        await eventually(lambda: self.seen(host).state is health.State.DOWN)

    async def test_a_command_that_is_not_there(self, host):
        answer = await self.do(host, "create", config={"command": ["/no/such/program"]})
        assert answer.outcome is messages.Outcome.FAILED
        assert "/no/such/program" in answer.reason or "No such file" in answer.reason

    async def test_a_running_process_is_adopted(self, host, tmp_path, start_process):
        child = await start_process("sleep", "1000")
        (tmp_path / "pid").write_text(str(child.pid))
        config = {"command": ["sleep", "3000"], "pid_file": str(tmp_path / "pid")}
        answer = await self.do(host, "create", config=config)
        assert answer.observed.properties["pid"] == child.pid


class TestMemory(contract.Contract):
    type_name = "memory"

    @pytest.fixture
    def config(self):
        return {"value": 1}

    @pytest.fixture
    def other(self, config):
        return {"value": 2}

    async def break_it(self, host):
        host.hosted["thing"].adapter.die("lightning")
        return True

    async def test_one_that_hangs_is_in_doubt(self, host):
        answer = await self.do(host, "create", config={"hangs": ["create"]}, timeout_s=0.05)
        assert answer.outcome is messages.Outcome.IN_DOUBT

    async def test_one_that_floods_is_heard_some_times(self, host, connect):
        heard: list[Any] = []
        bus = await connect("m1")
        async with await bus.subscribe("muster.manage.from.host.event.m1", handler=heard.append):
            await self.do(host, "create", config={}, manager="m1")
            adapter = host.hosted["thing"].adapter
            for number in range(1000):
                adapter.die(f"{number}")
            await eventually(lambda: host.dropped_events > 900 and heard)
            assert len(heard) <= 25


class TestBroker(contract.Contract):
    type_name = "broker"

    @pytest.fixture
    def config(self):
        return {"storage": False}

    @pytest.fixture
    def other(self, config):
        return {"storage": False, "connections_max": 100}

    async def break_it(self, host):
        os.kill(self.seen(host).properties["pid"], signal.SIGKILL)
        return True


class TestHttp(contract.Contract):
    type_name = "http"

    @pytest.fixture
    async def service(self):
        state = {"up": True}

        async def health_page(_: http.Request) -> http.Response:
            return http.text("ok" if state["up"] else "no", 200 if state["up"] else 503)

        server = await http.serve({"/health": health_page})
        yield server.url, state
        await server.close()

    @pytest.fixture
    def config(self, service):
        self.state = service[1]
        return {"health_url": f"{service[0]}/health", "every_s": 0.05}

    @pytest.fixture
    def other(self, config):
        return {**config, "failures": 1}

    async def break_it(self, host):
        self.state["up"] = False
        return True


class TestSparkQuery(contract.Contract):
    """The process and its checkpoint; the query itself is the pipeline's test."""

    type_name = "spark-query"
    restarts_alone = True

    @pytest.fixture
    def config(self, tmp_path):
        script = tmp_path / "query.py"
        script.write_text("import time\ntime.sleep(1000)\n")
        return {"script": str(script), "checkpoint": str(tmp_path / "checkpoint")}

    @pytest.fixture
    def other(self, config):
        return {**config, "master": "local[1]"}

    async def break_it(self, host):
        os.kill(self.seen(host).properties["pid"], signal.SIGKILL)
        return True

    async def test_a_query_without_progress_is_late(self, host, config, tmp_path):
        commits = tmp_path / "checkpoint" / "commits"
        commits.mkdir(parents=True)
        (commits / "0").write_text("v1")
        await self.do(host, "create", config={**config, "progress_s": 0.1})
        await eventually(lambda: self.seen(host).state is health.State.LATE)
        answer = await self.do(host, "execute", operation="progress")
        assert answer.result["batch"] == 0


def test_the_catalogue_has_each_and_checks_configurations():
    assert set(catalogue.OWN) <= set(catalogue.names())
    for name in catalogue.OWN:
        assert issubclass(catalogue.find(name), base.Adapter)
        assert catalogue.find(name).type_name == name
