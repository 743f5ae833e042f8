from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from muster.testing import child_process
from muster.testing.eventually import eventually

TALKS = """
import sys
print("ready on port 4222")
for line in sys.stdin:
    print("heard", line.strip(), file=sys.stderr)
print("bye")
"""


async def test_wait_for_lines_in_their_order(start_process):
    child = await start_process(sys.executable, "-c", TALKS)
    assert (await child.line(r"port (\d+)"))[1] == "4222"
    await child.write_line("one")
    await child.write_line("two")
    await child.line("heard one")
    await child.line("heard two")
    assert list(child.lines) == ["ready on port 4222", "heard one", "heard two"]


async def test_kill_minus_nine(start_process):
    child = await start_process(sys.executable, "-c", TALKS)
    await child.line("ready")
    await child.kill()
    assert child.exit_code == -signal.SIGKILL
    with pytest.raises(AssertionError, match=r"(?s)ended without printing 'bye'.*ready on port"):
        await child.line("bye")


async def test_a_line_that_does_not_come_shows_what_came(start_process):
    child = await start_process(sys.executable, "-c", TALKS)
    await child.line("ready")
    with pytest.raises(
        AssertionError, match=r"(?s)did not print 'nothing like it' within 0.1 s.*\| ready on port"
    ):
        await child.line("nothing like it", timeout_s=0.1)


async def test_the_whole_group_ends_with_the_block():
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid); input()"
    async with await child_process.start(sys.executable, "-c", code) as child:
        pid = int((await child.line(r"\d+"))[0])
        assert is_running(pid)
    await eventually(lambda: not is_running(pid))


async def test_exit_code_and_all_output(start_process):
    child = await start_process(sys.executable, "-c", "print('last words'); raise SystemExit(3)")
    assert await child.wait() == 3
    assert child.lines[-1] == "last words"


async def test_many_lines_are_kept_up_to_a_bound_and_none_is_skipped(start_process):
    count = child_process.LINES_MAX + 500
    child = await start_process(sys.executable, "-c", f"for n in range({count}): print('line', n)")
    await child.line(f"line {count - 1}$")
    assert len(child.lines) == child_process.LINES_MAX


async def test_python_children_find_muster(start_process):
    child = await start_process(sys.executable, "-c", "import muster; print(muster.__file__)", cwd=Path("/"))
    await child.line("muster/__init__")


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
