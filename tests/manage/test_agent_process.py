"""``muster agent`` as a machine runs it: by WebSocket through a proxy, and without any broker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from muster.testing.eventually import eventually
from tests.cli import driver
from tests.manage import test_cli, test_ways

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.may_block(reason="commands are run as a shell does"),
]

PATIENCE_S = 60.0
MANIFEST = 'resources: [{name: far, type: process, agent: host-b, config: {command: [sleep, "1000"]}}]'


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(entry.getsockname()[1]) for entry in sockets]


class AgentDomain:
    def __init__(self, home: Path, direct: list[int]) -> None:
        self.home = home
        home.mkdir()
        (home / "muster.toml").write_text(
            f'[domain]\nname = "work"\ndata_dir = "."\n[bus]\nport = 0\ntls = "on"\nwebsocket = true\n'
            f'[manage]\nbeat_s = "500ms"\ndirect_ports = {direct}\n'
        )

    async def __call__(self, *words: str | Path, stdin: str = "") -> Any:
        answer = await asyncio.to_thread(driver.run, "-o", "json", *words, home=self.home, stdin=stdin)
        assert answer.code == 0, f"{words}: {answer.out} {answer.err}"
        return json.loads(answer.out) if answer.out.strip() else None

    async def pid(self) -> int | None:
        """State of the remote process as its adapter observes it; None if unknown."""
        answer = await asyncio.to_thread(driver.run, "-o", "json", "exec", "far", "get", home=self.home)
        if answer.code != 0:
            return None
        (seen,) = test_cli.rows(answer.json())
        number: int | None = seen["result"]["properties"]["pid"]
        return number


@pytest.fixture
async def domain(tmp_path):
    made = AgentDomain(tmp_path / "home", free_ports(2))
    try:
        await made("up", "--detach")
        yield made
    finally:
        await asyncio.to_thread(driver.run, "down", home=made.home, timeout_s=PATIENCE_S)


@contextlib.asynccontextmanager
async def agent(folder: Path, *words: str) -> Any:
    line = driver.command_line("-o", "json", "agent", "--folder", folder, "--beat", "500ms", *words)
    process = await asyncio.create_subprocess_exec(
        *line, env=driver.environment(folder.parent), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert json.loads(await process.stdout.readline())["agent"] == "host-b"
        yield process
    finally:
        process.terminate()
        await process.communicate()


async def test_three_machines_join_at_once_with_tokens_that_ps_does_not_show(domain, tmp_path):
    tokens = [(await domain("agent", "token", name))["token"] for name in ("host-c", "host-d", "host-e")]
    (tmp_path / "token").write_text(tokens[0])
    ways: list[tuple[tuple[str, ...], dict[str, str], bytes | None]] = [
        (("--join-file", str(tmp_path / "token")), {}, None),
        (("--join", "-"), {}, tokens[1].encode()),
        ((), {"MUSTER_JOIN_TOKEN": tokens[2]}, None),
    ]
    async with contextlib.AsyncExitStack() as stack:
        joining = []
        for number, (words, variables, stdin) in enumerate(ways):
            folder = tmp_path / f"agent-{number}"
            line = driver.command_line("-o", "json", "agent", "--folder", folder, *words)
            process = await asyncio.create_subprocess_exec(
                *line,
                env=driver.environment(tmp_path) | variables,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            stack.push_async_callback(process.communicate)
            stack.callback(process.terminate)
            assert process.stdin is not None
            process.stdin.write(stdin or b"")
            process.stdin.close()
            joining.append(process)
        async with asyncio.timeout(PATIENCE_S):
            lines = [await process.stdout.readline() for process in joining if process.stdout is not None]
    assert [json.loads(line)["agent"] for line in lines] == ["host-c", "host-d", "host-e"]
    again = await asyncio.to_thread(
        driver.run, "agent", "--folder", tmp_path / "other", "--join", tokens[0], home=domain.home
    )
    assert again.code != 0
    assert "this token is spent" in again.err


async def test_through_a_proxy_by_websocket_then_without_any_broker(domain, tmp_path):
    folder, manifest = tmp_path / "agent", tmp_path / "fleet.yaml"
    manifest.write_text(MANIFEST)
    door = (await domain("status"))["brokers"][0]["websocket_url"]
    assert door.startswith("wss://")
    token = (await domain("agent", "token", "host-b", "--address", door))["token"]
    async with test_ways.RecordingProxy() as proxy:
        address = f"http://127.0.0.1:{proxy.port}"
        async with agent(folder, "--join", token, "--proxy", address):
            await domain("apply", "-f", manifest, "--wait", f"{PATIENCE_S:g}s")
            first = await domain.pid()
            assert first
            assert set(proxy.asked) == {door.rpartition("/")[2]}, "by the proxy, to that door, nowhere else"
            count = len(proxy.asked)
            assert count >= 2, "once to enrol, once to work"
        # The next time it knows the way, and finds its process again.
        async with agent(folder):
            await eventually(lambda: len(proxy.asked) > count)
            await _works(domain, first)
            await domain("exec", "far", "restart")
            second = await domain.pid()
            assert second not in (None, first)
        count = len(proxy.asked)

        # By lines to the managers.
        managers = [f"127.0.0.1:{port}" for port in json.loads(_ports(domain.home))]
        async with agent(folder, *(word for manager in managers for word in ("--direct", manager))):
            await _works(domain, second)
            await domain("exec", "far", "restart")
            assert await domain.pid() not in (None, second)
            assert len(proxy.asked) == count
            await domain("delete", "far", "--wait", f"{PATIENCE_S:g}s")


def _ports(home: Path) -> str:
    text = (home / "muster.toml").read_text()
    return text.partition("direct_ports = ")[2].strip()


async def _works(domain: AgentDomain, pid: int | None) -> None:
    """It answers, and has the process it had."""

    async def answers() -> bool:
        return await domain.pid() == pid

    await eventually(answers, timeout_s=PATIENCE_S)
