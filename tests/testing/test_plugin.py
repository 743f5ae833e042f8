"""The plugin, on small test suites in another process: tests that leak fail, and no others."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from muster.testing import child_process, plugin

ROOT = Path(__file__).parents[2]

SETTINGS = """
[pytest]
asyncio_mode = {mode}
asyncio_default_fixture_loop_scope = function
muster_strict = {strict}
filterwarnings = error
pythonpath = {src}
addopts = -p muster.testing.plugin -p no:cacheprovider --strict-markers --strict-config
"""

#: Plugins that stand beside ours in this environment, and take seconds to load.
OTHERS = ("anyio", "hypothesispytest", "schemathesis", "timeout", "xdist")
WITHOUT = [word for name in OTHERS for word in ("-p", f"no:{name}")]

IMPORTS = """
import asyncio, os, socket, subprocess, sys, threading, time
import pytest, pytest_asyncio
from muster.testing.plugin import require_part
"""


def run(
    pytester: pytest.Pytester, suite: str, *, strict: bool = True, mode: str = "auto", ci: bool = False
) -> dict[str, str]:
    """The outcome of each test: "error" where it passed and its tear-down did not."""
    pytester.makeini(SETTINGS.format(mode=mode, strict=strict, src=ROOT / "src"))
    pytester.makepyfile(IMPORTS + suite)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "src"))
        patch.setenv("CI", "true" if ci else "")
        result = pytester.runpytest_subprocess("-rA", "-v", *WITHOUT)
    outcomes: dict[str, str] = {}
    for line in result.outlines:
        words = line.split()
        if len(words) >= 2 and "::" in words[1] and words[0] in ("PASSED", "FAILED", "ERROR", "SKIPPED"):
            name, outcome = words[1].split("::")[1], words[0].lower()
            if outcomes.get(name) != "error":
                outcomes[name] = outcome
    outcomes["output"] = str(result.stdout)
    return outcomes


LEAKS = '''
from muster.testing import leaks

leaks.GRACE_S = 0.1  # what these tests leave does not end by itself

async def test_leaks_task():
    test_leaks_task.kept = asyncio.create_task(asyncio.Event().wait(), name="the-leaked-task")

async def test_leaks_server():
    test_leaks_server.kept = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)

def test_leaks_socket():
    test_leaks_socket.kept = socket.socket()

def test_leaks_file(tmp_path):
    test_leaks_file.kept = open(tmp_path / "leaked-file", "w")

def test_leaks_process():
    test_leaks_process.kept = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

def test_leaks_detached_process():
    """Its parent has ended, so no process waits for it."""
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)

def test_leaks_thread():
    event = threading.Event()
    threading.Thread(target=event.wait, name="the-leaked-thread", daemon=True).start()

async def test_error_reported_only_to_the_loop():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0.01)

@pytest.mark.may_leak("tasks", reason="this test shows that it may")
async def test_allowed_task():
    test_allowed_task.kept = asyncio.create_task(asyncio.Event().wait())

@pytest.mark.may_leak("tasks")
async def test_leaks_without_a_reason():
    pass
'''

TIDY = """
@pytest.fixture(scope="module")
def server():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener

@pytest.fixture(scope="module")
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.stdin.close()

@pytest_asyncio.fixture
async def worker():
    task = asyncio.create_task(asyncio.Event().wait())
    yield task
    task.cancel()

async def test_fixture_of_its_own(worker):
    assert not worker.done()

def test_opens_wider_fixtures(server, child):
    assert child.poll() is None

def test_uses_wider_fixtures(server, child):
    assert child.poll() is None

async def test_thread_and_process_that_end():
    await asyncio.to_thread(print, "hello")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass")
    assert await process.wait() == 0

async def test_server_and_client():
    async def echo(reader, writer):
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"line\\n")
        assert await reader.readline() == b"line\\n"
        writer.close()
        await writer.wait_closed()

@pytest.mark.virtual_time
async def test_virtual():
    await asyncio.sleep(3600)
"""


def test_a_leak_fails_the_test_and_is_named(pytester: pytest.Pytester):
    outcomes = run(pytester, LEAKS)
    output = outcomes.pop("output")
    assert outcomes == {
        "test_leaks_task": "error",
        "test_leaks_server": "error",
        "test_leaks_socket": "error",
        "test_leaks_file": "error",
        "test_leaks_process": "error",
        "test_leaks_detached_process": "error",
        "test_leaks_thread": "error",
        "test_error_reported_only_to_the_loop": "error",
        "test_allowed_task": "passed",
        "test_leaks_without_a_reason": "error",
    }
    for word in ("the-leaked-task", "the-leaked-thread", "leaked-file", "socket:[", "sleep 60", "division"):
        assert word in output


def test_what_is_tidy_passes(pytester: pytest.Pytester):
    outcomes = run(pytester, TIDY)
    output = outcomes.pop("output")
    assert set(outcomes.values()) == {"passed"}, output
    assert len(outcomes) == 6


def test_the_rules_are_off_by_default(pytester: pytest.Pytester):
    outcomes = run(
        pytester,
        """
def test_leaks_socket(fake_clock):
    test_leaks_socket.kept = socket.socket()

@pytest.mark.asyncio
async def test_blocks():
    time.sleep(0.001)
""",
        strict=False,
        mode="strict",
    )
    output = outcomes.pop("output")
    assert outcomes == {"test_leaks_socket": "passed", "test_blocks": "passed"}, output


def test_a_failed_test_shows_its_brokers_and_processes(pytester: pytest.Pytester):
    output = run(
        pytester,
        """
async def test_fails(broker, start_process):
    child = await start_process(sys.executable, "-c", "print('the last words'); input()")
    await child.line("last words")
    assert broker.state is None
""",
    )["output"]
    assert "log of broker" in output
    assert "Server is ready" in output
    assert "| the last words" in output


def test_a_report_is_text_that_utf8_can_encode(pytester: pytest.Pytester):
    pytester.makeconftest(
        "def pytest_runtest_logreport(report):\n"
        "    for _, text in report.sections:\n"
        "        text.encode()\n"
        "        print('reported', text)"
    )
    suite = "import logging\ndef test_logs(): logging.getLogger().warning('file \\udcff')"
    outcomes = run(pytester, suite)
    assert outcomes["test_logs"] == "passed"
    assert r"file \udcff" in outcomes["output"]


def test_the_entry_point_has_the_name_under_which_we_load_it_ourselves():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {plugin.__name__: plugin.__name__}


SKIPS = """
def test_with_the_part():
    require_part("the moon", True, hint="look up")

def test_without_the_part():
    require_part("the moon", False, hint="look up")

def test_skipped_for_no_reason():
    pytest.skip()
"""


@pytest.mark.parametrize("ci", [False, True])
def test_a_missing_part_is_a_skip_but_not_in_ci(pytester: pytest.Pytester, ci: bool):
    output = run(pytester, SKIPS, ci=ci)["output"]
    assert "missing dependency: the moon; look up" in output
    assert "was skipped without a reason" in output
    assert ("2 failed, 1 passed in" if ci else "1 failed, 1 passed, 1 skipped in") in output


def test_it_can_be_had_without_pytest_asyncio(pytester: pytest.Pytester):
    pytester.makepyfile("def test_plain(fake_clock): pass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "src"))
        result = pytester.runpytest_subprocess("-p", "muster.testing.plugin", "-p", "no:asyncio", *WITHOUT)
    result.assert_outcomes(passed=1)


async def test_tests_that_a_shell_put_into_the_background_can_still_press_ctrl_c(tmp_path: Path):
    ignoring = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    program = f"{ignoring}; os.execv(sys.argv[1], sys.argv[1:])"
    (tmp_path / "test_it.py").write_text(
        "import subprocess\n"
        "def test_it():\n"
        "    assert subprocess.run(['bash', '-c', 'kill -INT $$']).returncode == -2\n"
    )
    words = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "muster.testing.plugin",
        *WITHOUT,
        "test_it.py",
    )
    async with await child_process.start(
        sys.executable, "-c", program, sys.executable, *words, cwd=tmp_path
    ) as child:
        code = await child.wait(timeout_s=60)
        assert code == 0, child.tail()
