from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys

import pytest

from muster.app import home
from muster.core import errors
from muster.supervision import os_process

RUNNING = home.RunningDomain(
    domain="local",
    pid=1,
    started_at_s=1.0,
    version="0",
    servers=("nats://127.0.0.1:1",),
    health_url="http://x",
)


def test_the_home_is_the_one_chosen_else_here_else_the_user_s(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    assert home.Home.find(tmp_path / "x").root == tmp_path / "x"
    assert home.Home.find().root == tmp_path / "user" / ".muster"
    (tmp_path / ".muster").mkdir()
    assert home.Home.find().root == tmp_path / "user" / ".muster"  # a folder alone is not a home
    (tmp_path / ".muster" / "muster.toml").touch()
    assert home.Home.find().root == tmp_path / ".muster"


def test_folders_are_for_their_owner_only(tmp_path):
    folder = home.DomainFolder(tmp_path / "deep" / "local")
    folder.create()
    for path in (folder.root, folder.brokers, folder.logs, folder.run):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_second_process_learns_which_one_has_the_folder(tmp_path):
    folder = home.DomainFolder(tmp_path)
    assert folder.holder() is None
    with folder.hold():
        assert folder.holder() == os.getpid()
        with pytest.raises(errors.AlreadyExists, match=rf"pid {os.getpid()}"), folder.hold():
            pass
        folder.announce(RUNNING)
        assert folder.running() == RUNNING
    assert folder.holder() is None
    assert folder.running() is None
    with folder.hold():
        pass


def test_what_a_former_process_has_left_is_killed_and_nothing_else(tmp_path):
    folder = home.DomainFolder(tmp_path)
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as left,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other,
    ):
        folder.record_child("registry-1", left.pid)
        os.kill(left.pid, signal.SIGSTOP)
        # A process with the pid of one that has ended. That one started in an earlier tick of the kernel's
        # clock, as this process did; ``left`` and ``other`` may have started in the same one.
        (folder.children / "registry-2.pid").write_text(f"{other.pid} {os_process.start_time(os.getpid())}")
        (folder.children / "registry-3.pid").write_text("")
        folder.end_former_children()
        assert left.wait(timeout=30) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()
    folder.end_former_children()


def test_a_killed_holder_leaves_nothing_that_is_in_the_way(tmp_path):
    folder = home.DomainFolder(tmp_path)
    code = (
        "import sys, pathlib\nfrom muster.app import home\n"
        "with home.DomainFolder(pathlib.Path(sys.argv[1])).hold():\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        folder.announce(RUNNING)
        assert folder.holder() == holder.pid
        holder.kill()
        holder.wait(timeout=30)
    assert folder.running_file.exists()  # stale…
    assert folder.running() is None  # …and not trusted
    with folder.hold():
        assert not folder.running_file.exists()
