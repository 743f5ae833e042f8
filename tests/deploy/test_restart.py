"""systemd itself, as the first process of a namespace, restarts a domain that is killed or frozen."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from muster.app.operations import systemd_unit
from muster.testing.eventually import eventually
from muster.testing.plugin import require_part
from tests.cli import driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TARGET = "[Unit]\nDefaultDependencies=no\nWants=muster.service\n"
#: What the namespace lacks: other units, users, devices, and another folder for temporary files.
DROP_IN = """
[Unit]
DefaultDependencies=no
[Service]
User=
Group=
PrivateTmp=no
PrivateDevices=no
ProtectSystem=no
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
mount -t cgroup2 none /sys/fs/cgroup
cp -r {folder}/units/. /etc/systemd/system/
exec env -i PATH=/usr/bin:/bin container=other {systemd} --system --unit=test.target --log-target=null
"""


@contextlib.contextmanager
def systemd(folder: Path, home: Path) -> Iterator[psutil.Process]:
    """The first process, in namespaces that end with it."""
    program, unshare = shutil.which("systemd"), shutil.which("unshare")
    require_part("systemd", program and unshare and os.geteuid() == 0, hint="run as root, with systemd")
    variables = {
        name: driver.environment(home)[name] for name in ("PYTHONPATH", "MUSTER_HOME", "HOME", "PATH")
    }
    units = folder / "units"
    (units / "muster.service.d").mkdir(parents=True)
    (units / "test.target").write_text(TARGET)
    printed = systemd_unit.unit(program=Path("/bin/true"), home=home, user="")
    (units / "muster.service").write_text(printed)
    (units / "muster.service.d" / "test.conf").write_text(
        DROP_IN.format(
            environment=" ".join(f"{name}={value}" for name, value in variables.items()),
            command=" ".join(driver.command_line("up")),
            folder=folder,
        )
    )
    namespaces = ["--pid", "--fork", "--kill-child", "--mount", "--cgroup", "--ipc"]
    with subprocess.Popen(
        [str(unshare), *namespaces, "sh", "-c", INIT.format(folder=folder, systemd=program)],
        stdin=subprocess.DEVNULL,
    ) as outside:
        try:
            yield psutil.Process(outside.pid)
        finally:
            outside.kill()


async def test_systemd_restarts_a_domain_that_is_killed_or_frozen(tmp_path: Path):
    home = tmp_path / "home"
    settings = ("web.enabled=false", "notify.enabled=false", "manage.registries=1", "manage.managers=1")
    flags = [part for setting in settings for part in ("--set", setting)]
    answer = driver.run("init", "--port", "0", *flags, home=home)
    assert not answer.code, answer.err

    def main(outside: psutil.Process) -> int | None:
        for first in outside.children():
            for row in first.children():
                with contextlib.suppress(psutil.Error):  # it ends meanwhile
                    if row.cmdline()[-1:] == ["up"]:
                        return row.pid
        return None

    def replaced(outside: psutil.Process, before: int) -> bool:
        return main(outside) not in (None, before)

    async def is_ready() -> bool:
        for page in home.glob("*/run/domain.json"):
            with contextlib.suppress(OSError, ValueError, httpx.HTTPError):
                url = json.loads(page.read_text())["health_url"]
                async with httpx.AsyncClient(timeout=2) as client:
                    return (await client.get(f"{url}/readyz")).status_code == 200
        return False

    with systemd(tmp_path, home) as outside:
        await eventually(is_ready, timeout_s=100, what="ready")
        for number in (signal.SIGKILL, signal.SIGSTOP):
            before = main(outside)
            assert before is not None
            os.kill(before, number)
            is_replaced = functools.partial(replaced, outside, before)
            await eventually(is_replaced, timeout_s=40, what=number.name)
            await eventually(is_ready, timeout_s=100, what=f"ready after {number.name}")
