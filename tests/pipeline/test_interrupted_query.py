"""Ctrl-C during a query with Spark."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from muster.cli import main
from muster.pipeline.source import session
from tests.cli import driver

#: Prints a line when Java works on the query.
PROGRAM = """
import sys, threading, time
from muster.cli import interrupts
from muster.pipeline.source import session

interrupts.listen()

def announce(context):
    while not context.statusTracker().getActiveJobsIds():
        time.sleep(0.05)  # pace of looking
    print("busy", flush=True)

try:
    with session.temporary_session("local[1]") as spark:
        threading.Thread(target=announce, args=(spark.sparkContext,), daemon=True).start()
        spark.range(10**13).selectExpr("sum(hash(id))").collect()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.timeout(300)
def test_an_interrupted_query_prints_no_traceback():
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=driver.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "busy\n"
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: Java as well
        _, printed = program.communicate(timeout=60)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.communicate()
    assert printed == ""
    assert program.returncode == main.INTERRUPTED


class _Started:
    """A session that starts and ends as Spark does."""

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, lambda *_: None)

    def stop(self) -> None:
        warnings.warn("Unable to cleanly shutdown Spark JVM process.", RuntimeWarning, stacklevel=1)


def test_ctrl_c_keeps_its_handler_and_py4j_writes_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def start(**_: Any) -> _Started:
        return _Started()

    def log(file: str) -> None:
        for name in ("logging", "logging.getLogger('py4j.clientserver')"):
            exec(compile(f"import logging; {name}.error('a call of Java failed')", file, "exec"))

    monkeypatch.setattr(session, "start", start)
    handler = signal.getsignal(signal.SIGINT)
    of_py4j = str(Path(sys.prefix) / "site-packages" / "py4j" / "java_gateway.py")
    try:
        with session.temporary_session():
            assert signal.getsignal(signal.SIGINT) is handler
            log(of_py4j)
            assert caplog.records == []
            log(__file__)
            assert len(caplog.records) == 2, "the errors of others are logged"
        log(of_py4j)
        assert len(caplog.records) == 4
        with session.temporary_session(verbose=True):
            log(of_py4j)
        assert len(caplog.records) == 6
    finally:
        signal.signal(signal.SIGINT, handler)
    assert logging.getLogger().filters == []
