"""Every adapter that can run here, under the contract; and the specifics of each."""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import shutil
import signal
import time
from typing import Any

import psutil
import pytest

from muster.app.supervisor import worker
from muster.bus.http import server as http_server
from muster.core import errors, health, messages
from muster.manage import protocol
from muster.manage.adapters import base, memory, plugins, process, spark, systemd
from muster.manage.adapters import http as http_service
from muster.manage.adapters import output as output_file
from muster.testing.eventually import eventually
from tests.manage import contract


def limits_of(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/limits").read_text()


def runs(item: psutil.Process) -> bool:
    try:
        return item.is_running() and item.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class TestProcess(contract.AdapterContract):
    type_name = "process"
    restarts_alone = True
    speaks = "it is on"
    runs_commands = True

    @pytest.fixture
    def config(self):
        return {"command": ["sh", "-c", "echo it is on; exec sleep 1000"]}

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
            return "swordfish" in (await self.do(host, "execute", operation="log-page")).result["text"]

        await eventually(written)
        assert "swordfish" not in (tmp_path / "hosted" / "thing.json").read_text()

    async def test_health_by_port(self, host, tmp_path):
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        check = {"kind": "port", "port": port, "every_s": 0.05, "failures": 1}
        await self.do(host, "create", config={"command": ["sleep", "1000"], "health": check})
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        server.close()
        await server.wait_closed()
        await eventually(lambda: self.seen(host).state is health.HealthState.DOWN)

    async def test_health_by_http_and_a_restart_of_what_does_not_work(self, host):
        state = {"status": 500}

        async def page(_: http_server.HttpRequest) -> http_server.HttpResponse:
            return http_server.text("", state["status"])

        async with await http_server.serve({"/health": page}) as server:
            url = f"{server.url}/health"
            check = {"kind": "http", "url": url, "every_s": 0.05, "failures": 2, "start_s": 30}
            await self.do(host, "create", config={"command": ["sleep", "1000"], "health": check})
            assert self.seen(host).state is health.HealthState.STARTING
            await eventually(lambda: "500" in self.seen(host).reason)
            state["status"] = 200
            await eventually(lambda: self.seen(host).state is health.HealthState.UP)
            state["status"] = 503
            await eventually(lambda: self.seen(host).state is health.HealthState.DOWN)
            assert "503" in self.seen(host).reason

    async def test_health_by_command(self, host, tmp_path):
        flag = tmp_path / "well"
        flag.touch()
        check = {"kind": "command", "command": ["test", "-e", str(flag)], "every_s": 0.05, "failures": 1}
        await self.do(host, "create", config={"command": ["sleep", "1000"], "health": check})
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        flag.unlink()
        await eventually(lambda: self.seen(host).state is health.HealthState.DOWN)
        assert "exited with 1" in self.seen(host).reason

    async def test_limits_hold(self, host):
        limits = {"open_files": 17, "memory_bytes": 1 << 30, "cpu_s": 1}
        config = {"command": ["sh", "-c", "while :; do :; done"], "limits": limits}
        made = await self.do(host, "create", config=config)
        actual = limits_of(made.observed.properties["pid"])
        assert re.search(r"Max open files +17 +17", actual)
        assert re.search(rf"Max address space +{1 << 30} ", actual)
        await eventually(lambda: self.seen(host).state is health.HealthState.DOWN, timeout_s=60)
        assert "signal" in self.seen(host).reason, "its second of processor time is over"
        changed = {"command": ["sleep", "1000"], "limits": {"open_files": 19}}
        await self.do(host, "put", config=changed)
        await self.do(host, "execute", operation="start")
        pid = self.seen(host).properties["pid"]
        await self.do(host, "put", config={**changed, "limits": {"open_files": 18}})
        assert self.seen(host).properties["pid"] == pid, "limits change without a restart"
        assert re.search(r"Max open files +18 +18", limits_of(pid))

    async def test_output_has_a_bound(self, host, tmp_path, monkeypatch):
        monkeypatch.setattr(output_file, "BYTES_MAX", 10_000)
        monkeypatch.setattr(process, "OUTPUT_LOOK_S", 0.05)
        words = "yes noise | head -c 100000; echo more; touch told; read _ < go; echo last; exec sleep 1000"
        os.mkfifo(tmp_path / "go")
        await self.do(host, "create", config={"command": ["sh", "-c", words], "directory": str(tmp_path)})
        output = tmp_path / "hosted" / "thing" / "output"

        def ends_with(words: str) -> bool:
            text = output.read_text()
            return len(text) <= 10_000 and "noise\nnoise\n" in text and text.endswith(words)

        await eventually(lambda: (tmp_path / "told").exists() and ends_with("more\n"))
        await asyncio.to_thread((tmp_path / "go").write_text, "on\n")
        await eventually(lambda: ends_with("more\nlast\n"))  # it writes on behind what was kept

    async def test_what_it_started_ends_with_it(self, host, tmp_path):
        """Left alone it is killed; in a stop it may finish, until its time is over."""
        words = """
            sh -c 'trap "echo bye > said; exit" TERM; echo $$ > gentle; while :; do sleep 0.1; done' &
            sh -c 'trap "" TERM; echo $$ > stubborn; while :; do sleep 0.1; done' &
            exec sleep 1000
        """
        config = {"command": ["sh", "-c", words], "directory": str(tmp_path), "stop_s": 2}

        async def others() -> list[psutil.Process]:
            files = [tmp_path / "gentle", tmp_path / "stubborn"]
            await eventually(lambda: all(path.exists() and path.read_text() for path in files))
            processes = [psutil.Process(int(path.read_text())) for path in files]
            for file in files:
                file.unlink()
            return processes

        await self.do(host, "create", config=config)
        first = await others()
        os.kill(self.seen(host).properties["pid"], signal.SIGKILL)
        await eventually(lambda: not any(map(runs, first)))
        assert not (tmp_path / "said").exists()
        await self.do(host, "execute", operation="start")
        second = await others()
        await self.do(host, "execute", operation="stop")
        assert not any(map(runs, second))
        assert (tmp_path / "said").exists()

    async def test_a_command_that_is_not_there(self, host):
        answer = await self.do(host, "create", config={"command": ["/no/such/program"]})
        assert answer.outcome is messages.DecisionOutcome.FAILED
        assert "/no/such/program" in answer.reason or "No such file" in answer.reason

    async def test_a_running_process_is_adopted(self, host, tmp_path, start_process):
        child = await start_process("sleep", "1000")
        (tmp_path / "pid").write_text(str(child.pid))
        config = {"command": ["sleep", "3000"], "pid_file": str(tmp_path / "pid")}
        answer = await self.do(host, "create", config=config)
        assert answer.observed.properties["pid"] == child.pid


class TestMemoryAdapter(contract.AdapterContract):
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

    async def test_an_older_report_does_not_win_over_the_look_it_interrupts(self, host, config, monkeypatch):
        await self.do(host, "create", config=config)
        before, observe, reports = self.seen(host), memory.MemoryAdapter.observe, [True]

        async def interrupted(adapter: memory.MemoryAdapter) -> protocol.ObservedState:
            observed = await observe(adapter)
            if reports:
                reports.clear()
                adapter.context.report_state(before)  # what a watch saw before the stop, and reports only now
            return observed

        monkeypatch.setattr(memory.MemoryAdapter, "observe", interrupted)
        answer = await self.do(host, "execute", operation="stop")
        assert answer.observed.state is health.HealthState.DOWN
        assert self.seen(host).state is health.HealthState.DOWN

    async def test_one_that_hangs_is_in_doubt(self, host):
        answer = await self.do(host, "create", config={"hangs": ["create"]}, timeout_s=0.05)
        assert answer.outcome is messages.DecisionOutcome.IN_DOUBT

    async def test_a_flooding_agent_is_limited(self, host, connect):
        received: list[Any] = []
        bus = await connect("m1")
        async with await bus.subscribe("muster.manage.from.host.event.m1", handler=received.append):
            await self.do(host, "create", config={}, manager="m1")
            adapter = host.hosted["thing"].adapter
            for number in range(1000):
                adapter.die(f"{number}")
            await eventually(lambda: host.dropped_events > 900 and received)
            assert len(received) <= 25


class TestBroker(contract.AdapterContract):
    type_name = "broker"

    @pytest.fixture
    def broker_access(self, trust):
        return lambda: asyncio.to_thread(worker.broker_access, trust.folder)

    @pytest.fixture
    def config(self):
        return {"storage": False}

    @pytest.fixture
    def other(self, config):
        return {"storage": False, "connections_max": 100}

    async def break_it(self, host):
        os.kill(self.seen(host).properties["pid"], signal.SIGKILL)
        return True

    async def test_a_cancelled_stop_continues_and_the_next_start_waits_for_it(
        self, host, config, monkeypatch
    ):
        await self.do(host, "create", config=config)
        first = host.hosted["thing"].adapter.broker
        stopping, may_stop, stop = asyncio.Event(), asyncio.Event(), type(first).stop

        async def slow(made: Any, **options: Any) -> None:
            stopping.set()
            await may_stop.wait()
            await stop(made, **options)

        with monkeypatch.context() as patched:
            patched.setattr(type(first), "stop", slow)
            ending = asyncio.create_task(self.do(host, "execute", operation="stop"))
            await stopping.wait()
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
            starting = asyncio.create_task(self.do(host, "execute", operation="start"))
            await asyncio.sleep(0)
            may_stop.set()
            assert (await starting).outcome is messages.DecisionOutcome.DONE
        assert first.state.value == "stopped"
        assert first.pid is None
        assert host.hosted["thing"].adapter.broker is not first
        assert self.seen(host).state is health.HealthState.UP


class TestHttp(contract.AdapterContract):
    type_name = "http"
    stops = False  # without requests for it, a service is only monitored

    @pytest.fixture
    async def service(self):
        state = {"up": True}

        async def health_page(_: http_server.HttpRequest) -> http_server.HttpResponse:
            return http_server.text("ok" if state["up"] else "no", 200 if state["up"] else 503)

        server = await http_server.serve({"/health": health_page})
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

    async def mend(self, host):
        self.state["up"] = True

    async def test_a_service_that_is_gone_can_be_deleted(self, host, config):
        await self.do(host, "create", config={**config, "stop": {"url": "http://127.0.0.1:1/stop"}})
        assert (await self.do(host, "delete")).outcome is messages.DecisionOutcome.DONE

    async def test_an_answer_of_before_a_later_look_is_not_shown(self, host, config, monkeypatch):
        await self.do(host, "create", config={**config, "every_s": 0.01})
        adapter, problem = host.hosted["thing"].adapter, http_service._problem
        event, answered = asyncio.Event(), asyncio.Event()
        late = True

        async def slow(expected: Any) -> str | None:
            nonlocal late
            result = await problem(expected)
            if late:  # the first of them: that of the watch
                late = False
                event.set()
                await answered.wait()
            return result

        monkeypatch.setattr(http_service, "_problem", slow)
        await event.wait()
        self.state["up"] = False
        await adapter._check_now()
        assert self.seen(host).state is health.HealthState.DOWN
        shown: list[health.HealthState] = []
        monkeypatch.setattr(adapter.context, "report_state", lambda observed: shown.append(observed.state))
        answered.set()
        await eventually(lambda: len(shown) >= 1)
        assert shown[0] is health.HealthState.DOWN


SYSTEMCTL = """#!/bin/sh
# What systemctl does of its work, with a file for a unit: systemd itself does not run everywhere.
for unit; do :; done
state="$STATE_DIR/active"
[ "$unit" = other.service ] && state="$state-other"
case "$1" in
  start|restart) touch "$state" ;;
  stop) [ -e "$STATE_DIR/gone" ] && { echo "Unit $unit not loaded." >&2; exit 5; }; rm -f "$state" ;;
  show) if [ -e "$STATE_DIR/gone" ]; then echo LoadState=not-found; fi
        if [ -e "$state" ]; then echo ActiveState=active; echo SubState=running; echo MainPID=42
        else echo ActiveState=inactive; echo SubState=dead; echo MainPID=0; fi; echo Result=success ;;
  daemon-reload|try-restart) ;;
  *) echo "unknown $1" >&2; exit 1 ;;
esac
"""


class TestSystemdAdapter(contract.AdapterContract):
    """The decisions, against a program that answers as systemctl does."""

    type_name = "systemd"

    @pytest.fixture(autouse=True)
    def program(self, tmp_path, monkeypatch):
        program = tmp_path / "systemctl"
        program.write_text(SYSTEMCTL)
        program.chmod(0o755)
        monkeypatch.setattr(systemd, "PROGRAM", str(program))
        monkeypatch.setenv("STATE_DIR", str(tmp_path))
        self.active = tmp_path / "active"

    @pytest.fixture
    def config(self):
        return {"unit": "thing.service", "every_s": 0.05}

    @pytest.fixture
    def other(self, config):
        return {**config, "every_s": 0.1}

    async def break_it(self, host):
        self.active.unlink()
        return True

    @pytest.mark.parametrize("is_installed", [False, True])
    async def test_without_systemd_nothing_is_made_and_a_deletion_ends(
        self, host, config, monkeypatch, tmp_path, is_installed
    ):
        program = tmp_path / "other"
        if is_installed:  # in a container
            program.write_text("#!/bin/sh\necho 'System has not been booted with systemd' >&2; exit 1\n")
            program.chmod(0o755)
        with monkeypatch.context() as patched:
            patched.setattr(systemd, "PROGRAM", str(program))
            answer = await self.do(host, "create", config=config)
            assert answer.outcome is messages.DecisionOutcome.FAILED
            assert answer.code == errors.MissingDependency.code
            deleted = await self.do(host, "delete")
            assert deleted.outcome is messages.DecisionOutcome.DONE

    async def test_the_next_look_corrects_a_late_observation(self, host, config):
        await self.do(host, "create", config=config)
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        host.hosted["thing"].record_observation(
            protocol.ObservedState(True, health.HealthState.DOWN, "began before the unit was started")
        )
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)

    async def test_another_unit_takes_the_place_of_the_former(self, host, config):
        await self.do(host, "create", config=config)
        assert self.active.exists()
        await self.do(host, "put", config={**config, "unit": "other.service"})
        assert not self.active.exists(), "otherwise both would run"
        await self.do(host, "execute", operation="start")
        assert self.active.with_name("active-other").exists()

    async def test_a_unit_that_was_removed_with_its_program_can_be_deleted(self, host, config):
        await self.do(host, "create", config=config)
        self.active.unlink()
        (self.active.parent / "gone").touch()
        assert (await self.do(host, "delete")).outcome is messages.DecisionOutcome.DONE

    def test_a_name_that_is_no_unit_is_refused(self):
        for name in ("thing", "../thing.service", "-H x.service", "thing.mount"):
            with pytest.raises(errors.InvalidInput):
                base.convert(systemd.SystemdAdapter, {"unit": name})


class TestFile(contract.AdapterContract):
    type_name = "file"
    restarts_alone = True

    @pytest.fixture
    def config(self, tmp_path):
        self.path = tmp_path / "motd"
        return {"path": str(self.path), "content": "hello\n", "every_s": 0.05}

    @pytest.fixture
    def other(self, config):
        return {**config, "content": "goodbye\n"}

    async def break_it(self, host):
        self.path.write_text("vandalised\n")
        return True

    async def refused(self, host, config) -> str:
        answer = await self.do(host, "create", config=config)
        assert answer.outcome is not messages.DecisionOutcome.DONE
        await self.do(host, "delete")
        return str(answer.reason)

    @pytest.mark.parametrize("harm", ["content", "mode", "absence", "link"])
    async def test_every_difference_is_named_and_undone(self, host, config, harm, tmp_path):
        await self.do(host, "create", config={**config, "mode": "0640"})
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        match harm:
            case "content":
                self.path.write_text("vandalised\n")
            case "mode":
                self.path.chmod(0o666)
            case "absence":
                self.path.unlink()
            case "link":
                (tmp_path / "elsewhere").write_text("of another\n")
                self.path.unlink()
                self.path.symlink_to(tmp_path / "elsewhere")
        words = {"content": "content", "mode": "0666 instead", "absence": "not exist", "link": "regular"}
        await eventually(lambda: words[harm] in self.seen(host).reason)
        answer = await self.do(host, "execute", operation="start")
        assert answer.outcome is messages.DecisionOutcome.DONE, answer.reason
        if harm == "link":
            assert (tmp_path / "elsewhere").read_text() == "of another\n"
        assert self.path.read_text() == "hello\n"
        assert self.path.stat().st_mode & 0o777 == 0o640
        assert self.seen(host).state is health.HealthState.UP

    async def test_what_was_there_before_comes_back(self, host, config, other):
        self.path.write_text("of the distribution\n")
        self.path.chmod(0o600)
        await self.do(host, "create", config=config)
        await self.do(host, "put", config=other)
        assert self.path.read_text() == "goodbye\n"
        for verb in ("execute", "delete"):
            await self.do(host, verb, operation="stop")
            assert self.path.read_text() == "of the distribution\n"
            assert self.path.stat().st_mode & 0o777 == 0o600
        self.path.unlink()
        await self.do(host, "create", config=config)
        await self.do(host, "put", config={**config, "path": f"{self.path}.d"})
        assert not self.path.exists(), "it has moved"
        await self.do(host, "delete")
        assert not self.path.with_suffix(".d").exists()

    async def test_a_file_that_could_not_move_at_once_leaves_its_old_path_later(self, host, config):
        await self.do(host, "create", config=config)
        hosted, moved = host.hosted["thing"], {**config, "path": f"{self.path}.d"}
        hosted.resumed = False  # the agent was restarted, and has not found it yet
        await self.do(host, "put", config=moved)
        assert not self.path.exists()
        self.path.write_text("of another\n")
        await self.do(host, "put", config={**config, "content": "x"})
        await self.do(host, "delete")
        assert self.path.read_text() == "of another\n"

    async def test_a_deletion_ends_after_a_crash_and_without_its_folder(self, host, config, tmp_path):
        self.path.write_text("of the distribution\n")
        await self.do(host, "create", config=config)
        adapter = host.hosted["thing"].adapter
        adapter._put_back(self.path, adapter.context.runtime["was"])  # and it ended before this was recorded
        assert (await self.do(host, "delete")).outcome is messages.DecisionOutcome.DONE
        assert self.path.read_text() == "of the distribution\n"
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "x").write_text("before\n")
        await self.do(host, "create", config={**config, "path": str(folder / "x")})
        shutil.rmtree(folder)
        assert (await self.do(host, "delete")).outcome is messages.DecisionOutcome.DONE

    async def test_a_file_of_another_user_comes_back_without_its_owner(self, host, config, monkeypatch):
        self.path.write_text("of the distribution\n")
        await self.do(host, "create", config=config)
        host.hosted["thing"].context.runtime["was"] |= {"user": 12345}

        def chown(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "chown", chown)
        assert (await self.do(host, "delete")).outcome is messages.DecisionOutcome.DONE
        assert self.path.read_text() == "of the distribution\n"

    async def test_values_and_secrets_are_filled_in_and_not_stored(self, host, config, tmp_path):
        (tmp_path / "key").write_text("swordfish\n")
        more = {
            "content": "{{resource}} {{ port }} {{password}} {not this}\n",
            "values": {"port": "80", "password": {"secret": f"file:{tmp_path / 'key'}"}},
        }
        await self.do(host, "create", config={**config, **more})
        assert self.path.read_text() == "thing 80 swordfish {not this}\n"
        assert "swordfish" not in (tmp_path / "hosted" / "thing.json").read_text()
        (tmp_path / "key").write_text("trout\n")
        await self.do(host, "execute", operation="restart")
        assert "trout" in self.path.read_text()

    async def test_a_command_runs_after_a_change_and_only_then(self, host, config, tmp_path):
        reload = ["sh", "-c", f"echo again >> {tmp_path / 'reloads'}"]
        await self.do(host, "create", config={**config, "reload": reload})
        for _ in range(2):
            await self.do(host, "execute", operation="start")
        assert (tmp_path / "reloads").read_text() == "again\n"
        assert "exited with 3: no" in await self.refused(
            host, {**config, "content": "x", "reload": ["sh", "-c", "echo no; exit 3"]}
        )

    async def test_a_reload_that_failed_is_repeated(self, host, config, tmp_path):
        await self.do(host, "create", config=config)
        failing = {**config, "content": "x", "reload": ["test", "-e", str(tmp_path / "ready")]}
        for _ in range(2):
            answer = await self.do(host, "put", config=failing)
            assert "exited with 1" in answer.reason
            await self.do(host, "get")
            assert "has not succeeded" in self.seen(host).reason
        (tmp_path / "ready").touch()
        assert (await self.do(host, "execute", operation="start")).outcome is messages.DecisionOutcome.DONE
        assert self.seen(host).state is health.HealthState.UP

    async def test_what_cannot_be_is_refused_with_the_reason(self, host, config, tmp_path):
        assert "no value for {{user}}" in await self.refused(
            host, {**config, "content": "{{user}}", "values": {"port": "80"}}
        )
        assert "No such file" in await self.refused(host, {**config, "path": str(tmp_path / "no" / "x")})
        assert "path" in await self.refused(host, {**config, "path": "relative"})
        assert "mode" in await self.refused(host, {**config, "mode": "0999"})
        assert "no such user" in await self.refused(host, {**config, "user": "nobody-of-that-name"})
        (tmp_path / "folder").mkdir()
        assert "not a regular file" in await self.refused(host, {**config, "path": str(tmp_path / "folder")})

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
    async def test_the_owner_is_part_of_it(self, host, config):
        await self.do(host, "create", config={**config, "user": "nobody", "mode": "0600"})
        assert self.path.stat().st_uid == 65534
        os.chown(self.path, 0, 0)
        await eventually(lambda: "owner" in self.seen(host).reason)
        await self.do(host, "execute", operation="start")
        assert self.path.stat().st_uid == 65534


class TestSparkQuery(contract.AdapterContract):
    """The process and its checkpoint; the query itself is the pipeline's test."""

    type_name = "spark-query"
    runs_commands = True
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
        await eventually(lambda: self.seen(host).state is health.HealthState.LATE)
        answer = await self.do(host, "execute", operation="progress")
        assert answer.result["batch"] == 0

    async def test_a_clock_that_is_set_back_does_not_hide_progress(self, host, config, tmp_path, monkeypatch):
        monkeypatch.setattr(spark, "WATCH_S", 0.01)
        commits = tmp_path / "checkpoint" / "commits"
        commits.mkdir(parents=True)
        await self.do(host, "create", config={**config, "progress_s": 3600})
        assert self.seen(host).state is health.HealthState.STARTING
        (commits / "0").write_text("v1")
        an_hour_ago = time.time() - 3600  # what the clock says since it was set
        os.utime(commits / "0", (an_hour_ago, an_hour_ago))
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)


def test_the_catalogue_has_each_and_checks_configurations():
    assert set(plugins.BUILT_IN) <= set(plugins.names())
    for name in plugins.BUILT_IN:
        assert issubclass(plugins.load_adapter(name), base.Adapter)
        assert plugins.load_adapter(name).type_name == name


async def test_a_unit_whose_state_systemd_does_not_report_is_not_taken_for_down():
    reported: list[protocol.ObservedState] = []
    adapter: Any = systemd.SystemdAdapter(base.AdapterContext("site", None, reported.append))
    adapter._config = systemd.SystemdUnitConfig(unit="site.service")

    async def silent(*_: str, **__: bool) -> str:
        raise errors.TimedOut("systemctl show did not finish")

    adapter._systemctl = silent
    watching = asyncio.create_task(adapter.poll())
    await eventually(lambda: reported)
    watching.cancel()
    assert (reported[0].exists, reported[0].state) == (True, health.HealthState.UNKNOWN)
