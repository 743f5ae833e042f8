"""Storage URLs: which are accepted, and the history in an S3-compatible store."""

import asyncio
import contextlib
import re
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator

import pytest

from muster.core import errors
from muster.pipeline import settings
from muster.pipeline.alerts import tracker
from muster.pipeline.history import delta, maintenance, sql, storage, tables
from muster.pipeline.job import checkpoint_label, commit_state, driver_terms
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests.pipeline import test_history, traffic

HISTORY = "s3a://fleet/history"


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("/srv/history", "/srv/history"),
        ("file:///srv/a%20b", "/srv/a b"),
        ("s3://bucket/history/", "s3://bucket/history"),
        ("S3A://bucket/history", "s3a://bucket/history"),
        ("gs://bucket/history", "gs://bucket/history"),
        ("abfss://box@lake.dfs.core.windows.net/h", "abfss://box@lake.dfs.core.windows.net/h"),
    ],
)
def test_paths_and_urls_are_accepted(text, normal):
    assert storage.normalize(text) == normal


@pytest.mark.parametrize(
    "text",
    [
        "hdfs://namenode/history",
        "http://host/history",
        "s3:/bucket/history",
        "s3://",
        "s3://key:secret@bucket/history",
        "s3://bucket/history?region=x",
        "file://host/history",
        "abfss://lake.dfs.core.windows.net/h",
    ],
)
def test_other_urls_are_refused_before_anything_runs(text):
    with pytest.raises(errors.InvalidInput, match="history_dir") as refused:
        settings.PipelineSettings(history_dir=text)
    assert "secret" not in str(refused.value)


def test_a_checkpoint_may_be_in_hdfs_and_a_url_is_no_local_folder(tmp_path):
    chosen = settings.PipelineSettings(checkpoint_dir="hdfs://namenode/c", history_dir="s3a://bucket/h")
    assert chosen.checkpoint_root(tmp_path) == "hdfs://namenode/c"
    assert chosen.history_root(tmp_path) == "s3a://bucket/h"
    assert chosen.state_folder(tmp_path) == tmp_path / "pipeline"
    assert storage.spark_url("s3://bucket/h", "nodes") == "s3a://bucket/h/nodes"
    assert storage.delta_url("s3a://bucket/h", "nodes") == "s3://bucket/h/nodes"


def test_a_folder_that_cannot_be_used_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.InvalidInput, match="cannot be used"):
        storage.check(tmp_path / "file" / "history")


def test_an_endpoint_that_is_no_url_is_an_error_at_the_start(monkeypatch):
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:x", "ACCESS_KEY_ID": "a", "REGION": "r"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(errors.InvalidInput, match="cannot be used"):
        storage.check("s3://bucket/history")


def _create_bucket(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/fleet", method="PUT"), timeout=10):
            return True
    except OSError:
        return False


def _use() -> None:
    storage.check(HISTORY)
    for batch in range(3):
        rows = [
            traffic.report(f"m{n}", batch + 1, test_history.T0 + batch * test_history.HOUR) for n in range(10)
        ]
        assert test_history.store(HISTORY, batch, rows)  # type: ignore[arg-type]
    again = [traffic.report("again", 9, test_history.T0)]
    assert not test_history.store("s3://fleet/history", 2, again)  # type: ignore[arg-type]
    done = maintenance.run(HISTORY, test_history.T0 / 1000 + 3 * 86400)
    assert (done["hours"], done["compacted"]) == (3, 3)
    count = "SELECT count(*) AS n, sum(reports) AS reports FROM hourly"
    assert sql.rows(sql.query(HISTORY, count).table) == [{"n": 30, "reports": 30}]
    assert maintenance.delete_rows(HISTORY, tables.NODES, "machine", "m3") == 3
    assert sum(file.rows for file in delta.Snapshot(HISTORY, tables.NODES).files) == 27
    label = checkpoint_label.open_("s3a://fleet/checkpoint")
    assert checkpoint_label.open_("s3a://fleet/checkpoint") == label
    renewed = checkpoint_label.renew("s3a://fleet/checkpoint", {"reports": 7})
    assert renewed.run != label.run
    assert checkpoint_label.open_("s3a://fleet/checkpoint") == renewed
    assert driver_terms.read_last("s3a://fleet/checkpoint", "") is None
    for epoch in (3, 4):
        driver_terms.begin("s3a://fleet/checkpoint", driver_terms.DriverTerm(epoch=epoch, first=epoch))
    driver_terms.remove_before("s3a://fleet/checkpoint", 4)
    assert driver_terms.epochs("s3a://fleet/checkpoint") == [4]
    assert driver_terms.read_last("s3a://fleet/checkpoint", "") == driver_terms.TermProgress(
        driver_terms.DriverTerm(epoch=4, first=4)
    )
    alerts = commit_state.CommitStateStore("s3://fleet/history/_alerts", 4)
    alerts.save(commit_state.CommitState(tracker.AlertTrackerState(now_ms=7)))
    assert commit_state.CommitStateStore("s3://fleet/history/_alerts", 5).load().alerts.now_ms == 7
    with pytest.raises(errors.InvalidInput, match="cannot be used"):
        storage.check("s3://no-such-bucket/history")


@contextlib.asynccontextmanager
async def object_store(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """An S3-compatible server with the bucket `fleet`, and the environment that names it. Its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    names = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "REGION": "us-east-1"}
    for name, value in {**names, "ENDPOINT_URL": url, "ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    # A process of its own: delta-rs waits for answers while it holds Python's lock.
    async with await child_process.start(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port):
        await eventually(lambda: asyncio.to_thread(_create_bucket, url), timeout_s=60)
        yield url


def keys(url: str) -> list[str]:
    """The objects in the bucket, at most a thousand."""
    with urllib.request.urlopen(f"{url}/fleet?list-type=2", timeout=30) as answer:
        return re.findall(r"<Key>(.*?)</Key>", answer.read().decode())


@pytest.mark.may_leak("threads", "files", reason="delta-rs keeps connections")
async def test_the_history_lives_in_an_object_store(monkeypatch):
    async with object_store(monkeypatch):
        await asyncio.to_thread(_use)
