"""Commands of users inside resources: terminals, pipes, exit codes, limits, and who may."""

from __future__ import annotations

import asyncio
import hashlib
import signal
from typing import Any

import pytest

from muster.core import errors, messages
from muster.manage import client, protocol
from muster.manage.agent import shells
from muster.supervision import os_process
from muster.testing.eventually import eventually


@pytest.fixture
async def web(fleet, process_manifest, tmp_path) -> Any:
    """A fleet with the running resource `web`."""
    fleet.former = [await fleet.registry(), await fleet.manager()]
    fleet.host = await fleet.agent()
    more = f"      directory: {tmp_path}\n      environment: {{COLOR: green}}\n"
    await fleet.client.apply(process_manifest("web", more=more))
    await fleet.client.wait("web", "up")
    yield fleet
    await fleet.client.delete("web")
    await fleet.client.wait_gone("web")


async def run(fleet: Any, *command: str, data: bytes | None = None, **options: Any) -> tuple[str, str, int]:
    """The output, the errors and the exit code."""
    parts: dict[int, bytes] = {1: b"", 2: b""}
    async with fleet.client.run_inside("web", *command, **options) as session:
        if data is not None:
            await session.write(data)
            await session.end_input()
        async for number, part in session.output():
            parts[number] += part
        return parts[1].decode(), parts[2].decode(), session.exit_code


class Screen:
    """What a session with a terminal has shown."""

    def __init__(self, session: Any) -> None:
        self.text = ""
        self.session = session
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for _, part in self.session.output():
            self.text += part.decode()

    async def shows(self, text: str) -> None:
        await eventually(lambda: text in self.text)


async def test_output_errors_and_exit_code(web):
    found = await run(web, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert found == ("out\n", "err\n", 3)


async def test_a_signal_is_a_negative_exit_code(web):
    assert (await run(web, "sh", "-c", "kill -9 $$"))[2] == -9


async def test_input_reaches_it_and_ends(web):
    data = bytes(range(256)) * 1000
    out, _, code = await run(web, "sha256sum", data=data)
    assert (out.split()[0], code) == (hashlib.sha256(data).hexdigest(), 0)


async def test_it_runs_as_the_process_does(web, tmp_path):
    out, _, _ = await run(web, "sh", "-c", "pwd; echo $COLOR; test -t 0 || echo no terminal")
    assert out.splitlines() == [str(tmp_path), "green", "no terminal"]


async def test_a_program_that_does_not_exist(web):
    _, err, code = await run(web, "no-such-program")
    assert code == 127
    assert "no-such-program" in err


async def test_long_output_is_complete_and_waits_for_its_reader(web):
    async with web.client.run_inside("web", "head", "-c", "1000000", "/dev/zero") as session:
        size = 0
        async for _, part in session.output():
            size += len(part)
            (known,) = web.host.shells._sessions.values()
            assert known._kept <= shells.KEPT_BYTES_MAX + 8192
    assert size == 1_000_000


async def test_a_terminal_has_a_size_that_changes(web):
    script = "trap 'stty size; exit 5' WINCH; stty size; test -t 0 && test -t 1 && echo $TERM ready; "
    words = ("sh", "-c", f"{script} while :; do sleep 0.05; done")
    async with web.client.run_inside("web", *words, terminal="xterm", rows=30, columns=90) as session:
        screen = Screen(session)
        await screen.shows("xterm ready")
        assert "30 90" in screen.text
        await session.resize(31, 91)
        await screen.shows("31 91")
        await screen.task
        assert session.exit_code == 5


async def test_ctrl_c_interrupts_what_runs_in_the_terminal(web):
    script = "trap 'echo caught; exit 7' INT; echo ready; while :; do sleep 0.05; done"
    async with web.client.run_inside("web", "sh", "-c", script, terminal="xterm") as session:
        screen = Screen(session)
        await screen.shows("ready")
        await session.write(b"\x03")
        await screen.task
        assert session.exit_code == 7
    assert "caught" in screen.text


async def test_an_interactive_shell_in_a_terminal_of_unknown_size(web):
    async with web.client.run_inside("web", "sh", "-i", terminal="dumb", rows=0, columns=0) as session:
        screen = Screen(session)
        await session.resize(0, 0)
        await session.write(b"stty size\n")
        await screen.shows("24 80")
        await session.write(b"echo $((6 * 7))\n")
        await screen.shows("42")
        await session.write(b"exit 4\n")
        await screen.task
        assert session.exit_code == 4


async def test_what_its_user_leaves_ends(web):
    async with web.client.run_inside("web", "sh", "-c", "sleep 1000 & echo $$; wait") as session:
        _, part = await anext(session.output())
        pid = int(part)
        assert len(os_process.members("", pid)) >= 2
    assert not os_process.members("", pid)
    assert not web.host.shells._sessions


async def test_a_silent_user_is_gone(web, monkeypatch):
    monkeypatch.setattr(shells, "SILENT_S", 0.3)
    session = web.client.run_inside("web", "sleep", "1000")
    await session.start()
    assert len(web.host.shells._sessions) == 1
    await eventually(lambda: not web.host.shells._sessions)
    with pytest.raises(errors.NotFound, match="did not hear of its user"):
        await session.write(b"x")


async def test_it_ends_with_the_resource(web):
    async with web.client.run_inside("web", "sleep", "1000") as session:
        await web.client.put("web", desired="down")
        async for _ in session.output():
            pass
        assert session.exit_code == -signal.SIGTERM
    await web.client.wait("web", "down")
    with pytest.raises(errors.Conflict, match="web is not running"):
        await run(web, "true")


async def test_the_number_of_commands_is_bounded(web, monkeypatch):
    monkeypatch.setattr(shells, "OF_ONE_MAX", 2)
    bob = client.ManageClient(await web.connect("bob"))
    async with web.client.run_inside("web", "sleep", "1000"), web.client.run_inside("web", "sleep", "1000"):
        with pytest.raises(errors.LimitExceeded, match="2 of them of ann"):
            await run(web, "true")
        async with bob.run_inside("web", "true") as session:
            async for _ in session.output():
                pass
            assert session.exit_code == 0


async def test_no_other_user_reaches_a_session(web):
    bob = client.ManageClient(await web.connect("bob"))
    async with web.client.run_inside("web", "sleep", "1000") as session:
        stolen = bob.run_inside("web", "true")
        stolen._id = session._id
        with pytest.raises(errors.NotFound):
            await stolen.write(b"x")
        await stolen.stop()
        assert len(web.host.shells._sessions) == 1


async def test_a_session_survives_its_manager_and_registry(web):
    async with web.client.run_inside("web", "cat") as session:
        screen = Screen(session)
        await session.write(b"first\n")
        await screen.shows("first")
        await web.manager("manager-2")
        await web.registry("registry-2")
        for part in web.former:
            await part.stop()
        await session.write(b"second\n")
        await screen.shows("second")
        await session.end_input()
        await screen.task
    assert screen.text == "first\nsecond\n"


@pytest.mark.parametrize("operation", ["shell", "shell-exchange", "ann/0123456789abcdef"])
async def test_no_operation_begins_a_command(web, operation):
    arguments = {"type": "begin", "command": ["true"]}
    (row,) = await web.client.exec(operation, "web", arguments=arguments)
    assert row.outcome == "refused"
    assert not web.host.shells._sessions


async def test_begin_and_end_are_in_the_activity_log(web):
    await run(web, "sh", "-c", "exit 3")
    with pytest.raises(errors.NotFound):
        await web.client.run_inside("nothing", "true").start()

    async def recorded() -> bool:
        found = [entry for entry in await web.client.decisions() if entry.what == "shell"]
        return len(found) == 3

    await eventually(recorded)
    begun, ended, refused = [entry for entry in await web.client.decisions() if entry.what == "shell"]
    assert (begun.who, begun.target, begun.details["command"]) == ("ann", "web", "sh -c exit 3")
    assert (ended.who, ended.target, ended.why) == ("ann", "web", "exit code 3")
    assert refused.outcome is messages.DecisionOutcome.REFUSED


@pytest.mark.parametrize(
    "command", [[], ["a\0b"], ["x"] * 1001, ["x" * 70_000]], ids=["empty", "nul", "many", "long"]
)
async def test_a_wrong_command_is_refused(web, command):
    with pytest.raises(errors.MusterError, match="shell"):
        await run(web, *command)
    assert not web.host.shells._sessions


async def test_other_types_run_no_commands(web):
    await web.client.apply("resources: [{name: note, type: memory, agent: host-a}]", wait_s=10)
    with pytest.raises(errors.Refused, match="inside resources of the type memory"):
        await web.client.run_inside("note", "true").start()


def test_input_counts_once():
    """A request that is repeated writes what it has not written yet."""

    class Process:
        written = b""

        def write(self, data: bytes) -> int:
            self.written += data[:3]
            return len(data[:3])

    async def scenario() -> bytes:
        process = Process()
        session = shells.ShellSession("web", process)  # type: ignore[arg-type]
        request = protocol.ShellExchange(sent=0, data=b"abcdef")
        assert (await session.exchange(request)).taken == 3
        assert (await session.exchange(request)).taken == 6
        assert (await session.exchange(request)).taken == 6
        return process.written

    assert asyncio.run(scenario()) == b"abcdef"
