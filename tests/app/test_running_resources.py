from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from muster.app.operations import running_resources
from muster.manage.agent import operation_log
from muster.supervision import os_process


def test_resources_whose_processes_run_are_named(tmp_path: Path):
    for name, token in (("runs-1", "a-token"), ("ended-1", "another"), ("memory-1", "")):
        record = operation_log.OperationRecord(name=name, runtime={"token": token} if token else {})
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(record))
    (tmp_path / "damaged.json").write_bytes(b"[" * 100_000)
    pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], {os_process.MARK: "a-token"})
    try:
        assert running_resources.find(tmp_path) == ["runs-1"]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert running_resources.find(tmp_path) == []
