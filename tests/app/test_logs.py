from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import sys
import time

import pytest

from muster.app import home, log_files, process
from muster.app import settings as app_settings
from muster.core.settings import domain, loader
from muster.core.telemetry import log


def test_pieces_together_stay_within_their_budget(tmp_path):
    path = tmp_path / "domain.log"
    with log_files.RotatingFile(path, 1_000, 0) as stream:
        for number in range(1_000):
            stream.write(f"line {number:04}\n")
    sizes = {piece.name: piece.stat().st_size for piece in tmp_path.iterdir()}
    assert set(sizes) == {"domain.log", "domain.log.1", "domain.log.2", "domain.log.3"}
    assert all(size <= 1_000 for size in sizes.values())
    assert path.read_text().splitlines()[-1] == "line 0999"  # the newest are those that stay
    assert (tmp_path / "domain.log.1").read_text().splitlines()[-1] < path.read_text().splitlines()[0]


def test_only_the_owner_reads_a_log(tmp_path):
    path = tmp_path / "domain.log"
    path.touch(mode=0o644)  # as versions before made it
    with log_files.RotatingFile(path, 10, 0) as stream:
        for _ in range(3):
            stream.write("a line\n")
    assert [piece.stat().st_mode & 0o777 for piece in tmp_path.iterdir()] == [0o600] * 3


def test_only_the_owner_reads_the_errors_of_a_start(tmp_path):
    folder = home.DomainFolder(tmp_path)
    with pytest.raises(process.StartFailed):
        process.detach(["up", "--no-such-option"], folder, timeout_s=60)
    assert (folder.logs / process.ERRORS_NAME).stat().st_mode & 0o777 == 0o600


def test_it_continues_where_it_stopped(tmp_path):
    for text in ("one\n", "two\n"):
        with log_files.RotatingFile(tmp_path / "a.log", 1_000, 0) as stream:
            stream.write(text)
    assert (tmp_path / "a.log").read_text() == "one\ntwo\n"


def test_where_no_new_piece_can_be_opened_the_older_ones_stay(tmp_path):
    def pieces() -> dict[str, str]:
        return {piece.name: piece.read_text() for piece in tmp_path.glob("a.log*")}

    with log_files.RotatingFile(tmp_path / "a.log", 100, 0) as stream:
        for number in range(40):
            stream.write(f"line {number:04}\n")
        before = pieces()
        (tmp_path / ".a.log.new").mkdir()  # as if there were no descriptor left
        for number in range(40, 100):
            stream.write(f"line {number:04}\n")
        assert stream.lost > 0
        kept = pieces()
        assert all(kept[name].startswith(text) for name, text in before.items())
        (tmp_path / ".a.log.new").rmdir()
        stream.write("again\n")
    assert (tmp_path / "a.log").read_text() == "again\n"
    assert pieces()["a.log.1"] == kept["a.log"]


def test_old_pieces_go(tmp_path):
    for number in (1, 2):
        (tmp_path / f"a.log.{number}").write_text("old")
    os.utime(tmp_path / "a.log.2", (0, time.time() - 100))
    with log_files.RotatingFile(tmp_path / "a.log", 1_000, 50):
        pass
    assert sorted(piece.name for piece in tmp_path.iterdir()) == ["a.log", "a.log.1"]


def test_a_line_that_cannot_be_written_is_counted_and_harmless(tmp_path):
    stream = log_files.RotatingFile(tmp_path / "a.log", 1_000, 0)
    stream._file.close()
    stream._file = io.FileIO("/dev/full", "w")  # every write fails with "no space left on device"
    stream.write("lost\n")
    assert stream.lost == 1
    stream.close()


def test_events_are_json_lines_in_the_file(tmp_path):
    end = log_files.configure(domain.BaseSettings(), tmp_path / "domain.log")
    log.EventLog("app").info("started", domain="local")
    logging.getLogger("asyncio").error("a library complains")
    end()
    logging.getLogger("asyncio").error("afterwards it goes elsewhere")
    lines = (tmp_path / "domain.log").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["started", "a library complains"]


def test_ours_and_the_brokers_logs_fit_the_budget_together():
    settings = loader.load(domain.BaseSettings, flags={"bus.brokers": 3, "retention.logs.max_bytes": "64MiB"})
    ours = log_files.file_bytes(settings) * log_files.PIECES
    theirs = 3 * log_files.broker_file_bytes(settings, 3) * 4
    assert ours + theirs <= 64 << 20


async def test_a_process_whose_log_cannot_be_opened_is_not_stopped_by_its_output(tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "print('x' * (1 << 20))", stdout=asyncio.subprocess.PIPE
    )
    settings = loader.load(app_settings.Settings, flags={"domain.data_dir": str(tmp_path)})
    captured = log_files.CapturedProcess(process, tmp_path / "missing" / "a.log", settings, processes=1)
    async with asyncio.timeout(60):
        assert await captured.wait() == 0
