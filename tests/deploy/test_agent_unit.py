"""The shipped unit of the agent under systemd itself, with the drop-in of the guide: it operates units of the
machine, runs processes as other users with limits, and leaves them running when it is replaced.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from muster.testing.plugin import require_part
from tests.cli import driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.may_block(reason="commands are run")]

ROOT = pathlib.Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "muster-agent.service"
GUIDE = ROOT / "docs" / "guides" / "processes.md"
TARGET = "[Unit]\nDefaultDependencies=no\nWants=muster-agent.service\n"
#: What the namespace lacks: other units, and devices; and what a test cannot use: the installed program.
LACKS = """
[Unit]
DefaultDependencies=no
[Service]
PrivateTmp=no
PrivateDevices=no
ProtectHome=no
Environment={environment}
ExecStart=
ExecStart={command}
StandardOutput=append:{folder}/output
StandardError=append:{folder}/output
"""
INIT = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /etc/systemd/system
mount -t tmpfs tmpfs /var/lib
mount -t cgroup2 none /sys/fs/cgroup
cp -r {folder}/units/. /etc/systemd/system/
exec env -i PATH=/usr/bin:/bin container=other {systemd} --system --unit=test.target --log-target=null
"""
MANIFEST = """
resources:
  - name: clock
    type: systemd
    agent: host-b
    config:
      unit: clock.service
      every_s: 0.2
      definition: |
        [Unit]
        DefaultDependencies=no
        [Service]
        ExecStart=/bin/sleep 1000
  - name: shop
    type: process
    agent: host-b
    config:
      command: [sleep, "2000"]
      user: nobody
"""
LIMITED = """
resources:
  - name: limited
    type: process
    agent: host-b
    restart: {attempts: 1}
    config: {command: [sleep, "3000"], cgroup: {memory_bytes: 67108864, processes: 50}}
"""


def drop_in() -> str:
    """Of the guide."""
    match = re.search(r"```text\n# \S+/privileged.conf\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert match is not None
    return match[1]


@pytest.fixture
def home(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    folder = tmp_path / "home"
    settings = ("web.enabled=false", "notify.enabled=false", "manage.registries=1", "manage.managers=1")
    flags = [part for setting in (*settings, "manage.beat_s=0.5") for part in ("--set", setting)]
    answer = driver.run("init", "--port", "0", *flags, home=folder)
    assert not answer.code, answer.err
    answer = driver.run("up", "--detach", home=folder, timeout_s=120)
    assert not answer.code, answer.err
    yield folder
    driver.run("down", home=folder, timeout_s=120)


@pytest.fixture
def machine(tmp_path: pathlib.Path, home: pathlib.Path) -> Iterator[psutil.Process]:
    """The first process of a machine of its own whose agent is enrolled in the domain of ``home``."""
    program, unshare = shutil.which("systemd", path="/lib/systemd:/usr/lib/systemd"), shutil.which("unshare")
    require_part("systemd", program and unshare and os.geteuid() == 0, hint="run as root, with systemd")
    token = muster(home, "agent", "token", "host-b")["token"]
    enrol = driver.command_line("agent", "--join", token, "--folder", str(tmp_path / "agent"))
    with subprocess.Popen(enrol, env=driver.environment(tmp_path), stdout=subprocess.PIPE) as once:
        assert once.stdout is not None
        assert b"is up" in once.stdout.readline()
        once.terminate()
    units = tmp_path / "units"
    (units / "muster-agent.service.d").mkdir(parents=True)
    (units / "test.target").write_text(TARGET)
    (units / UNIT.name).write_text(UNIT.read_text())
    (units / "muster-agent.service.d" / "1.conf").write_text(drop_in())
    variables = {name: value for name, value in driver.environment(home).items() if name == "PYTHONPATH"}
    variables["HOME"] = str(tmp_path)
    command = driver.command_line("agent", "--folder", str(tmp_path / "agent"), "--beat", "500ms")
    lacks = LACKS.format(
        environment=" ".join(f"{name}={value}" for name, value in variables.items()),
        command=" ".join(command),
        folder=tmp_path,
    )
    (units / "muster-agent.service.d" / "2.conf").write_text(lacks)
    namespaces = ["--pid", "--fork", "--kill-child", "--mount", "--cgroup", "--ipc"]
    words = [str(unshare), *namespaces, "sh", "-c", INIT.format(folder=tmp_path, systemd=program)]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL) as outside:
        try:
            yield psutil.Process(outside.pid)
        finally:
            outside.kill()


def muster(home: pathlib.Path, *words: str, **options: Any) -> Any:
    answer = driver.run("-o", "json", *words, home=home, timeout_s=120, **options)
    assert answer.code == 0, f"{words}: {answer.out} {answer.err}"
    return json.loads(answer.out) if answer.out.strip() else None


def find(machine: psutil.Process, *end: str) -> psutil.Process | None:
    for process in machine.children(recursive=True):
        try:
            words = process.cmdline()
            if tuple(words[-len(end) :]) == end and words[:1] != ["/bin/sh"]:  # not its shim
                return process
        except psutil.Error:  # it ends meanwhile
            continue
    return None


def limits(machine: psutil.Process, home: pathlib.Path, folder: pathlib.Path) -> None:
    """They hold; where the kernel has its controllers in version 1, they are refused with the reason."""
    (init,) = (process for process in machine.children() if process.name() == "systemd")
    root = pathlib.Path("/proc", str(init.pid), "root", "sys/fs/cgroup")
    (folder / "limited.yaml").write_text(LIMITED)
    if "memory" not in (root / "cgroup.controllers").read_text():
        applied = driver.run("apply", "-f", str(folder / "limited.yaml"), "--wait", "60s", home=home)
        assert "cgroup v2 has no controller memory, pids in /sys/fs/cgroup/system.slice" in applied.err
        assert not find(machine, "sleep", "3000")
    else:
        muster(home, "apply", "-f", str(folder / "limited.yaml"), "--wait", "60s")
        limited = find(machine, "sleep", "3000")
        assert limited is not None
        own = pathlib.Path(f"/proc/{limited.pid}/cgroup").read_text().strip().rpartition("/")[2]
        (group,) = root.rglob(own)
        assert (group / "memory.max").read_text().strip() == "67108864"
        assert (group / "pids.max").read_text().strip() == "50"
    muster(home, "delete", "limited", "--wait", "60s")


def test_the_unit_operates_units_and_processes(machine, home, tmp_path):
    output = tmp_path / "output"
    driver.wait_until(lambda: output.exists() and "agent host-b is up" in output.read_text(), timeout_s=90)
    (tmp_path / "fleet.yaml").write_text(MANIFEST)
    muster(home, "apply", "-f", str(tmp_path / "fleet.yaml"), "--wait", "60s")
    clock, shop = find(machine, "sleep", "1000"), find(machine, "sleep", "2000")
    assert clock is None
    clock = find(machine, "/bin/sleep", "1000")
    assert clock is not None
    assert shop is not None
    assert shop.username() == "nobody"
    limits(machine, home, tmp_path)

    # What the agent hosts goes on while it is replaced, and is found again.
    agent = find(machine, "--beat", "500ms")
    assert agent is not None
    agent.send_signal(signal.SIGKILL)
    driver.wait_until(lambda: find(machine, "--beat", "500ms") not in (None, agent), timeout_s=60)
    driver.wait_until(lambda: output.read_text().count("agent host-b is up") == 2, timeout_s=60)
    assert find(machine, "/bin/sleep", "1000") == clock
    assert find(machine, "sleep", "2000") == shop

    # A unit that ends is started again.
    clock.send_signal(signal.SIGKILL)
    driver.wait_until(lambda: find(machine, "/bin/sleep", "1000") not in (None, clock), timeout_s=60)
    muster(home, "delete", "-f", str(tmp_path / "fleet.yaml"), "--wait", "60s")
    assert not find(machine, "/bin/sleep", "1000")
    assert not find(machine, "sleep", "2000")
