"""Containers: the parts of their logs, and the adapter under the contract with a real Podman."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
import struct
from typing import Any

import psutil
import pytest

from muster.core import errors, health, messages
from muster.manage import protocol
from muster.manage.adapters import base
from muster.manage.adapters.containers import container, engine, log_pages
from muster.manage.agent import watchdog
from muster.testing.eventually import eventually, throughout
from tests import debian
from tests.manage import contract, podman

ID = "0123456789abcdef"


def log_of(*lines: tuple[int, str]) -> bytes:
    """As Podman 4.3 sends it: a frame for each line, which begins with its second."""
    data = b""
    for second, text in lines:
        line = f"2026-11-19T08:22:{second:02}Z {text}\n".encode()
        data += struct.pack(">BxxxL", 1, len(line)) + line
    return data


def page(data: bytes, **query: Any) -> protocol.LogPage:
    return log_pages.page(ID, log_pages.entries(data), protocol.LogQuery(**query), 1795076560.0)


def test_parts_of_a_log_add_up_also_within_a_second():
    data = log_of((1, "a"), (1, "b"), (2, "c"), (2, "d" * 60), (2, "e"))
    text, cursor, parts = "", "", 0
    while True:
        part = page(data, cursor=cursor, bytes_max=64)
        text, cursor, parts = text + part.text, part.cursor, parts + 1
        if part.is_last:
            break
    assert text == f"a\nb\nc\n{'d' * 60}\ne\n"
    assert parts > 1
    assert part.cursor == part.end
    later = log_of((2, "c"), (2, "d" * 60), (2, "e"), (2, "f"), (3, "g"))  # since the second of the cursor
    assert page(later, cursor=cursor).text == "f\ng\n"
    assert page(log_of(), cursor=cursor).text == ""


def test_the_last_lines_a_time_and_another_container():
    data = log_of((1, "a"), (30, "b"), (40, "c"))
    assert page(data, lines=2).text == "b\nc\n"
    assert page(data, lines=0).text == ""
    assert page(data, since_s=15).text == "b\nc\n"
    assert page(data, since_s=5).text == "c\n"
    assert page(data, cursor="fedcba987654:9:9").text == "a\nb\nc\n", "the log of the next container"
    assert page(data, cursor=page(data, lines=0).cursor).text == ""
    until = page(log_of((1, "a")), lines=0).end
    assert page(data, until=until).text == "a\n"


def test_a_line_that_is_too_long_is_cut():
    assert page(log_of((1, "x" * 10_000), (2, "y")), bytes_max=1_000).text.endswith("…\n")


@pytest.mark.parametrize(
    ("image", "name", "tag"),
    [
        ("box", "box", "latest"),
        ("box:1", "box", "1"),
        ("host:5000/a/box", "host:5000/a/box", "latest"),
        ("host:5000/a/box:1.2", "host:5000/a/box", "1.2"),
        ("box@sha256:abc", "box", "sha256:abc"),
    ],
)
def test_the_tag_of_an_image(image, name, tag):
    assert engine.split_image(image) == (name, tag)


@pytest.mark.parametrize(
    "wrong",
    [{"ports": ["eighty"]}, {"volumes": ["/data"]}, {"image": ""}, {"name": "-x"}, {"pull": "often"}],
)
def test_what_no_engine_accepts_is_refused_before_anything_is_done(wrong):
    with pytest.raises(errors.InvalidInput, match=next(iter(wrong))):
        base.convert(container.ContainerAdapter, {"image": "box", **wrong})


async def test_a_missing_engine_is_unavailable_and_says_what_to_do(tmp_path):
    adapter = container.ContainerAdapter(base.AdapterContext("web", tmp_path, lambda _: None))
    config = container.ContainerConfig(image="box", socket=str(tmp_path / "no.sock"))
    with pytest.raises(errors.Refused, match=r"podman\.socket"):
        await adapter.create(config, start=True)
    assert adapter._observed().state is health.HealthState.DOWN
    await adapter.delete()  # nothing was made that the engine would have to remove
    assert not (await adapter.observe()).exists


def memory_limits(pid: int) -> set[str]:
    """Of the groups that contain the process, of version 1 or 2."""
    groups = pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    group = next(line.rpartition(":")[2] for line in groups if ":memory:" in line or line.startswith("0::"))
    root = pathlib.Path("/sys/fs/cgroup")
    files = [*root.glob(f"**{group}/memory.limit_in_bytes"), *root.glob(f"**{group}/memory.max")]
    return {file.read_text().strip() for file in files}


def processor_time(socket: str) -> float:
    """Of the engine that serves the socket, in seconds."""
    (engine_,) = (
        found
        for found in psutil.process_iter(["cmdline"])
        if f"unix://{socket}" in (found.info["cmdline"] or ()) and found.ppid() == os.getpid()
    )
    times = engine_.cpu_times()
    return float(times.user + times.system)


@pytest.fixture(scope="class", name="socket")
def socket_of_podman(request):
    debian.PODMAN.require()
    if request.cls.privileged and os.geteuid() != 0:
        pytest.skip("a Podman with privileges needs root")
    with podman.podman(privileged=request.cls.privileged) as path:
        yield path


@pytest.mark.slow
class TestContainer(contract.AdapterContract):
    privileged = True
    type_name = "container"
    restarts_alone = True
    speaks = "it is on"
    runs_commands = True

    @pytest.fixture
    def config(self, socket):
        return {
            "image": podman.IMAGE,
            "command": ["sh", "-c", "trap 'exit 3' TERM; echo it is on; while :; do sleep 0.1; done"],
            "network": "none",
            "pull": "never",
            "socket": socket,
        }

    @pytest.fixture
    def other(self, config):
        return {**config, "environment": {"MODE": "other"}}

    async def break_it(self, host: Any) -> bool:
        os.kill(self.seen(host).properties["pid"], signal.SIGKILL)
        return True

    async def test_what_is_configured_holds_inside(self, host, config, tmp_path):
        (tmp_path / "key").write_text("swordfish\n")
        (tmp_path / "data").mkdir()
        words = 'echo "$KEY" "$MODE"; busybox id -u; busybox pwd; echo kept > /data/file; exec sleep 1000'
        more = {
            "command": ["sh", "-c", words],
            "environment": {"KEY": {"secret": f"file:{tmp_path / 'key'}"}, "MODE": "test"},
            "user": "1234",
            "directory": "/bin",
            "volumes": [f"{tmp_path / 'data'}:/data"],
            "limits": {"memory_bytes": 64 << 20, "processes": 20},
        }
        (tmp_path / "data").chmod(0o777)
        made = await self.do(host, "create", config={**config, **more})
        assert made.outcome is messages.DecisionOutcome.DONE, made.reason

        async def log() -> str:
            return str((await self.do(host, "execute", operation="log-page")).result["text"])

        async def is_written() -> bool:
            return await log() == "swordfish test\n1234\n/bin\n"

        await eventually(is_written)
        assert (tmp_path / "data" / "file").read_text() == "kept\n"
        pid = self.seen(host).properties["pid"]
        assert str(64 << 20) in await asyncio.to_thread(memory_limits, pid)
        assert "swordfish" not in (tmp_path / "hosted" / "thing.json").read_text()

    async def test_exit_codes_and_signals(self, host, config):
        await self.do(host, "create", config={**config, "command": ["sh", "-c", "exit 7"]})
        await eventually(lambda: self.seen(host).properties.get("exit_code") == 7)
        assert self.seen(host).state is health.HealthState.DOWN
        assert self.seen(host).reason == "exit code 7"
        assert self.seen(host).ran == 0
        await self.do(host, "put", config=config, generation=4)
        await self.do(host, "execute", operation="start")
        assert self.seen(host).ran == 4
        await self.do(host, "execute", operation="signal", arguments={"number": 9})
        await eventually(lambda: self.seen(host).properties.get("exit_code") == -9)
        await self.do(host, "execute", operation="start")
        await self.do(host, "execute", operation="stop")
        await eventually(lambda: self.seen(host).properties.get("exit_code") == 3)
        assert self.seen(host).reason == "stopped"

    @pytest.mark.may_leak("processes", reason="Podman waits a second after each command inside")
    async def test_health_by_a_command_inside(self, host, config):
        check = {"kind": "command", "command": ["sh", "-c", "busybox test -e /tmp-well"], "every_s": 0.2}
        words = "echo > /tmp-well; while busybox test -e /tmp-well; do sleep 0.1; done; exec sleep 1000"
        await self.do(
            host,
            "create",
            config={**config, "command": ["sh", "-c", words], "health": {**check, "failures": 1}},
        )
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        root = pathlib.Path(f"/proc/{self.seen(host).properties['pid']}/root")
        (root / "tmp-well").unlink()
        await eventually(lambda: self.seen(host).state is health.HealthState.DOWN)
        assert "health check failed" in self.seen(host).reason

    @pytest.mark.may_leak("processes", reason="Podman waits a second after each command inside")
    async def test_hooks_run_inside(self, host, config):
        def hook(text: str) -> protocol.HookCommand:
            return protocol.HookCommand(command=("sh", "-c", text))

        declared = protocol.Hooks(post_start=hook("echo > /began"), pre_stop=hook("echo > /proc/1/fd/1 bye"))
        made = await self.do(host, "create", config=config, hooks=declared)
        assert made.outcome is messages.DecisionOutcome.DONE, made.reason
        root = pathlib.Path(f"/proc/{self.seen(host).properties['pid']}/root")
        assert await asyncio.to_thread((root / "began").exists)
        await self.do(host, "execute", operation="stop")
        assert "bye" in str((await self.do(host, "execute", operation="log-page")).result["text"])
        failing = protocol.Hooks(post_start=hook("echo no queue; exit 7"))
        await self.do(host, "put", config=config, hooks=failing)
        refused = await self.do(host, "execute", operation="start")
        assert refused.reason == "thing: its post_start hook failed with exit code 7: no queue"
        assert self.seen(host).state is health.HealthState.DOWN

    async def test_what_cannot_be_is_refused_and_what_is_foreign_is_left_alone(self, host, config, socket):
        missing = await self.do(host, "create", config={**config, "image": "localhost/none:1"})
        assert missing.outcome is messages.DecisionOutcome.FAILED
        assert "no image localhost/none:1" in missing.reason
        await self.do(host, "delete")
        there = engine.ContainerEngine(socket)
        definition = {"Image": podman.IMAGE, "Cmd": ["sleep", "1000"], "HostConfig": {"NetworkMode": "none"}}
        await there.json("POST", "/containers/create", definition, name="muster-thing")
        foreign = await self.do(host, "create", config=config)
        assert foreign.outcome is messages.DecisionOutcome.FAILED
        assert "does not belong to this resource" in foreign.reason
        assert await there.json("GET", "/containers/muster-thing/json")
        await there.send("DELETE", "/containers/muster-thing", force=1)

    async def test_an_engine_that_does_not_answer_is_no_end_of_its_containers(
        self, host, config, socket, monkeypatch
    ):
        monkeypatch.setattr(container, "RETRY_S", 0.1)
        monkeypatch.setattr(container, "WAIT_S", 0.5)
        await self.do(host, "create", config=config)
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        os.rename(socket, f"{socket}.away")
        await eventually(lambda: self.seen(host).state is health.HealthState.UNKNOWN)
        changed = {**config, "environment": {"MODE": "changed"}}
        refused = await self.do(host, "put", config=changed)
        assert refused.code == errors.Unavailable.code, "it may still run as before"
        os.rename(f"{socket}.away", socket)
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        before = self.seen(host).properties["container"]
        await self.do(host, "put", config=changed)
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        assert self.seen(host).properties["container"] != before

    async def test_the_watchdog_ends_what_may_move_without_the_engine(self, host, config, socket, tmp_path):
        words = ["sh", "-c", "exec busybox env -i sleep 1000"]
        await self.do(host, "create", config={**config, "command": words})
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        record = json.loads((tmp_path / "hosted" / "thing.json").read_text()) | {"stop_after_s": 5.0}
        (tmp_path / "thing.json").write_text(json.dumps(record))
        times = watchdog.marked_times(tmp_path)
        assert set(times.values()) == {4.5}
        os.rename(socket, f"{socket}.away")
        try:
            assert await asyncio.to_thread(watchdog.kill, {*times})
        finally:
            os.rename(f"{socket}.away", socket)
        await eventually(lambda: self.seen(host).properties.get("exit_code") == -9)

    async def test_it_may_move_only_where_its_processes_can_be_ended(self, host, config, monkeypatch):
        await self.do(host, "create", config=config, start=False)
        thing = host.hosted["thing"]
        monkeypatch.setattr(thing.context, "may_move", lambda: True)
        with monkeypatch.context() as patched:
            patched.setattr(container, "_can_end", lambda pid, marks: False)
            refused = await self.do(host, "execute", operation="start")
        assert "cannot end its processes without the engine" in refused.reason
        assert not thing.adapter._pid
        started = await self.do(host, "execute", operation="start")
        assert started.outcome is messages.DecisionOutcome.DONE
        assert thing.adapter.can_be_ended

    async def test_a_running_container_costs_the_engine_no_processor_time(self, host, config, socket):
        await self.do(host, "create", config={**config, "command": ["sleep", "1000"]})
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        before = processor_time(socket)
        await throughout(lambda: self.seen(host).state is health.HealthState.UP, for_s=3)
        assert processor_time(socket) - before < 0.6

    async def test_an_engine_that_is_started_later(self, host, config, socket, monkeypatch):
        monkeypatch.setattr(container, "RETRY_S", 0.1)
        os.rename(socket, f"{socket}.away")
        try:
            for _ in range(2):  # as a manager does
                await self.do(host, "create", config=config)
            await eventually(lambda: self.seen(host).state is health.HealthState.UNKNOWN)
        finally:
            os.rename(f"{socket}.away", socket)
        await eventually(lambda: self.seen(host).state is health.HealthState.DOWN)
        await self.do(host, "execute", operation="start")
        assert self.seen(host).state is health.HealthState.UP

    async def test_it_is_removed_by_others_and_comes_back(self, host, config, socket):
        await self.do(host, "create", config=config)
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        there = engine.ContainerEngine(socket)
        await there.send("DELETE", "/containers/muster-thing", force=1)
        await eventually(lambda: self.seen(host).state is health.HealthState.DOWN)
        await self.do(host, "execute", operation="start")
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)


@pytest.mark.slow
class TestRootlessContainer(TestContainer):
    privileged = False

    async def test_what_is_configured_holds_inside(self, host, config, tmp_path):
        words = 'echo "$MODE"; busybox id -u; busybox pwd; exec sleep 1000'
        more = {"command": ["sh", "-c", words], "environment": {"MODE": "test"}, "directory": "/bin"}
        made = await self.do(host, "create", config={**config, **more})
        assert made.outcome is messages.DecisionOutcome.DONE, made.reason

        async def is_written() -> bool:
            log = (await self.do(host, "execute", operation="log-page")).result["text"]
            return bool(log == "test\n0\n/bin\n")

        await eventually(is_written)
        pid = self.seen(host).properties["pid"]
        assert os.stat(f"/proc/{pid}").st_uid == os.stat(config["socket"]).st_uid
