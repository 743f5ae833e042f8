"""The systemd adapter under the contract with a real systemd: a user's manager of its own.

On a machine that was not booted with systemd, a mount namespace pretends that it was; this needs root.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import shutil
import signal
import subprocess
from typing import Any

import pytest

from muster.core import health, messages
from muster.manage.adapters import systemd
from muster.testing.eventually import eventually
from tests.manage import contract

SYSTEMD = shutil.which("systemd", path="/lib/systemd:/usr/lib/systemd")
BOOTED = "mount -t tmpfs none /run && mkdir -p /run/systemd/system"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SYSTEMD and shutil.which("systemctl") and shutil.which("unshare") and os.geteuid() == 0),
        reason="there is no systemd here, or no right to start one",
    ),
]


def definition(seconds: int) -> str:
    return f"[Service]\nExecStart=/bin/sleep {seconds}\n"


class TestSystemd(contract.AdapterContract):
    type_name = "systemd"
    restarts_alone = True

    @pytest.fixture(autouse=True)
    async def manager(self, tmp_path, monkeypatch, start_process):
        for name in ("run", "user"):
            (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
        monkeypatch.setenv("HOME", str(tmp_path / "user"))
        monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)
        start = f"{BOOTED} && exec {SYSTEMD} --user --unit=basic.target"
        await start_process("unshare", "--mount", "sh", "-c", start, env=dict(os.environ))
        await eventually((tmp_path / "run" / "systemd" / "private").exists, timeout_s=30)
        await eventually(self.answers, timeout_s=30)

    async def answers(self) -> bool:
        words = ("systemctl", "--user", "is-active", "basic.target")
        done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=False)
        return done.stdout.strip() == "active"

    @pytest.fixture
    def config(self):
        return {"unit": "thing.service", "user": True, "definition": definition(1000), "every_s": 0.1}

    @pytest.fixture
    def other(self, config):
        return {**config, "definition": definition(2000)}

    async def break_it(self, host: Any) -> bool:
        os.kill(self.seen(host).properties["pid"], signal.SIGKILL)
        return True

    async def test_operations_and_a_new_definition(self, host, config, other):
        await self.do(host, "create", config=config)
        first = self.seen(host).properties["pid"]
        assert self.command(first)[-1] == "1000"
        answer = await self.do(host, "put", config=other)
        assert answer.outcome is messages.DecisionOutcome.DONE
        assert self.command(self.seen(host).properties["pid"])[-1] == "2000"
        await self.do(host, "execute", operation="stop")
        await eventually(lambda: self.seen(host).state is health.HealthState.DOWN)
        await self.do(host, "execute", operation="restart")
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        file = systemd._path(systemd.SystemdUnitConfig(**other))
        assert file.exists()
        await self.do(host, "delete")
        assert not file.exists()

    async def test_a_failed_unit_has_a_reason(self, host, config):
        failing = {**config, "definition": "[Service]\nExecStart=/bin/sh -c 'exit 7'\n"}
        await self.do(host, "create", config=failing)
        await eventually(lambda: "exit-code" in self.seen(host).reason)
        assert self.seen(host).state is health.HealthState.DOWN

    @staticmethod
    def command(pid: int) -> list[str]:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
