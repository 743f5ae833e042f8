"""Storage URLs: which are accepted, and the history in an S3-compatible store."""

import asyncio
import base64
import contextlib
import email.utils
import hmac
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import types
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from muster.core import errors
from muster.pipeline import settings
from muster.pipeline.alerts import tracker
from muster.pipeline.history import delta, maintenance, sql, storage, tables
from muster.pipeline.job import checkpoint_label, commit_state, service
from muster.pipeline.job.driver import driver_terms
from muster.testing import child_process
from muster.testing.eventually import eventually
from muster.testing.plugin import require_part
from tests.pipeline import test_history, traffic


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
        "/srv/100%41",
        "file:///srv/a%5Bb%5D",
        "s3://bucket/*",
        "s3://buc\nket/history",
        "/srv/\0",
        "file:///srv/%00",
        "abfss://box@/history",
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
    assert storage.spark_url("/srv/a b", "nodes") == "file:///srv/a b/nodes"
    assert storage.delta_url("s3a://bucket/h", "nodes") == "s3://bucket/h/nodes"


def test_a_folder_that_cannot_be_used_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.InvalidInput, match="cannot be used"):
        storage.check(tmp_path / "file" / "history")


def test_a_checkpoint_that_cannot_be_used_is_an_error_before_the_pipeline_waits_for_its_turn(tmp_path):
    (tmp_path / "file").write_text("")
    chosen = settings.PipelineSettings(checkpoint_dir=str(tmp_path / "file" / "checkpoint"))
    with pytest.raises(errors.InvalidInput, match=r"checkpoint_dir: .* cannot be used"):
        service.PipelineService(
            types.SimpleNamespace(identity="pipeline"),
            chosen,
            service.PipelinePaths(tmp_path, ()),
        )
    with pytest.raises(errors.InvalidInput, match="checkpoint_dir: hdfs") as refused:
        storage.check("hdfs://127.0.0.1:9/c", setting="checkpoint_dir", checkpoint=True)
    assert "Hadoop" in (refused.value.hint or "")


def test_a_file_that_tests_the_folder_does_not_make_it_a_foreign_checkpoint(tmp_path):
    (tmp_path / f"{storage.CHECK_PREFIX}1").write_text("")
    assert checkpoint_label.open_(str(tmp_path)).run
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "offsets").mkdir()
    with pytest.raises(checkpoint_label.CheckpointUnusable, match="did not create"):
        checkpoint_label.open_(str(tmp_path / "other"))


def test_the_identity_of_the_machine_is_used_on_request(monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    monkeypatch.delenv("AWS_METADATA_ENDPOINT", raising=False)
    storage.delta_url("s3://bucket/history")
    assert "AWS_METADATA_ENDPOINT" not in os.environ


@pytest.mark.parametrize(
    "endpoint", [{}, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true"}]
)
def test_without_credentials_the_machine_is_not_asked_for_its_identity(endpoint: dict[str, str]):
    """In a process of its own: the variables are inherited by children and executors."""
    program = (
        "import os\n"
        "from muster.pipeline.history import storage\n"
        "try:\n"
        "    storage.check('s3://bucket/history')\n"
        "except storage.errors.InvalidInput as error:\n"
        "    print(error)\n"
        "print(storage.spark_url('s3://bucket/history'))\n"
        "print(*(f'{name}={value}' for name, value in sorted(os.environ.items()) if 'METADATA' in name))\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment = {**inherited, **endpoint, "AWS_REGION": "r"}

    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    refused, _, variables = done.stdout.splitlines()
    assert "cannot be used" in refused
    assert "169.254" not in refused
    assert variables == "AWS_EC2_METADATA_DISABLED=true AWS_METADATA_ENDPOINT=http://127.0.0.1:1"


def test_an_endpoint_that_is_no_url_is_an_error_at_the_start(monkeypatch):
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:x", "ACCESS_KEY_ID": "a", "REGION": "r"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(errors.InvalidInput, match="cannot be used"):
        storage.check("s3://bucket/history")


def _accepted(request: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=10):
            return True
    except OSError:
        return False


def _create_bucket(url: str) -> bool:
    return _accepted(urllib.request.Request(f"{url}/fleet", method="PUT"))


def _use(root: str) -> None:
    """Everything that the pipeline, maintenance and readers do with a history and a checkpoint."""
    history, checkpoint = f"{root}/history", f"{root}/checkpoint"
    storage.check(history)
    for batch in range(3):
        rows = [
            traffic.report(f"m{n}", batch + 1, test_history.T0 + batch * test_history.HOUR) for n in range(10)
        ]
        assert test_history.store(history, batch, rows)  # type: ignore[arg-type]
    again = [traffic.report("again", 9, test_history.T0)]
    assert not test_history.store(history.replace("s3a:", "s3:"), 2, again)  # type: ignore[arg-type]
    done = maintenance.run(history, test_history.T0 / 1000 + 3 * 86400)
    assert (done["hours"], done["compacted"]) == (3, 3)
    count = "SELECT count(*) AS n, sum(reports) AS reports FROM hourly"
    assert sql.rows(sql.query(history, count).table) == [{"n": 30, "reports": 30}]
    assert maintenance.delete_rows(history, tables.NODES, "machine", "m3") == 3
    assert sum(file.rows for file in delta.Snapshot(history, tables.NODES).files) == 27
    maintenance.purge(history, tables.NODES)
    with pytest.raises(storage.FilesRemoved):
        sql.query(history, "SELECT max(cpu_percent) FROM nodes", as_of=3)
    with pytest.raises(storage.FilesRemoved):
        test_history.search_rows(history, as_of=3)  # type: ignore[arg-type]
    label = checkpoint_label.open_(checkpoint)
    assert checkpoint_label.open_(checkpoint) == label
    renewed = checkpoint_label.renew(checkpoint, {"reports": 7})
    assert renewed.run != label.run
    assert checkpoint_label.open_(checkpoint) == renewed
    assert driver_terms.read_last(checkpoint, "") is None
    for epoch in (3, 4):
        driver_terms.begin(checkpoint, driver_terms.DriverTerm(epoch=epoch, first=epoch))
    driver_terms.remove_before(checkpoint, 4)
    assert driver_terms.epochs(checkpoint) == [4]
    assert driver_terms.read_last(checkpoint, "") == driver_terms.TermProgress(
        driver_terms.DriverTerm(epoch=4, first=4)
    )
    alerts = commit_state.CommitStateStore(f"{history}/_alerts", 4)
    saved = commit_state.CommitState(tracker.AlertTrackerState(now_ms=7))
    alerts.save(msgspec.json.encode(saved))
    assert commit_state.CommitStateStore(f"{history}/_alerts", 5).load().alerts.now_ms == 7
    with pytest.raises(errors.InvalidInput, match="cannot be used"):
        storage.check(root.replace("fleet", "no-such-bucket") + "/history")


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextlib.asynccontextmanager
async def object_store(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """An S3-compatible server with the bucket `fleet`, and the environment that names it. Its address."""
    port = _free_port()
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


async def test_the_history_lives_in_an_object_store(monkeypatch):
    """In a process of its own: no limit of a process works while native code holds Python's global lock."""
    code = "from tests.pipeline import test_storage; test_storage._use('s3a://fleet')"
    async with object_store(monkeypatch), await child_process.start(sys.executable, "-c", code) as using:
        assert await using.wait(timeout_s=100) == 0, "\n".join(using.lines)


# Emulators of the other stores, installed once.

AZURITE = "azurite@3"
AZURE_ACCOUNT = "devstoreaccount1"  # account and key of every emulator
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
GCS_SERVER = "github.com/fsouza/fake-gcs-server@v1.56.1"
CACHE = Path.home() / ".cache" / "muster"


def _azurite() -> Path | None:
    folder = CACHE / AZURITE.replace("@", "-")
    program = folder / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists() and shutil.which("npm") and shutil.which("node"):
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", AZURITE]
        subprocess.run(command, cwd=folder, capture_output=True, timeout=600, check=False)
    return program if program.exists() else None


def _create_container(url: str) -> bool:
    """Azure's request to create the container `fleet`, signed with the key of the account."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + "\n" * 12 + f"{signed}/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/fleet\nrestype:container"
    digest = hmac.digest(base64.b64decode(AZURE_KEY), text.encode(), "sha256")
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    headers["Content-Length"] = "0"
    request = urllib.request.Request(
        f"{url}/{AZURE_ACCOUNT}/fleet?restype=container", method="PUT", headers=headers
    )
    return _accepted(request)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.may_leak("threads", "files", reason="delta-rs keeps connections")
async def test_the_history_lives_in_azure(monkeypatch):
    program = await asyncio.to_thread(_azurite)
    require_part(AZURITE, program, hint="needs node, npm and a network the first time")
    assert program is not None
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", url)
    words = (program, "--blobPort", port, "--silent", "--inMemoryPersistence", "--skipApiVersionCheck")
    async with await child_process.start(*words):
        await eventually(lambda: asyncio.to_thread(_create_container, url), timeout_s=120)
        await asyncio.to_thread(_use, f"abfss://fleet@{AZURE_ACCOUNT}.dfs.core.windows.net")


def _gcs_server() -> Path | None:
    program = CACHE / "go" / "fake-gcs-server"
    if not program.exists() and shutil.which("go"):
        environment = {**os.environ, "GOBIN": str(program.parent)}
        command = ["go", "install", GCS_SERVER]
        subprocess.run(command, env=environment, capture_output=True, timeout=800, check=False)
    return program if program.exists() else None


def _create_gcs_bucket(url: str) -> bool:
    request = urllib.request.Request(
        f"{url}/storage/v1/b?project=test", b'{"name": "fleet"}', {"Content-Type": "application/json"}
    )
    return _accepted(request)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.may_leak("threads", "files", reason="delta-rs keeps connections")
async def test_the_history_lives_in_google_cloud_storage(monkeypatch, tmp_path):
    program = await asyncio.to_thread(_gcs_server)
    require_part(GCS_SERVER, program, hint="needs go and a network the first time")
    assert program is not None
    port, proxy_port = _free_port(), _free_port()
    url = f"http://127.0.0.1:{proxy_port}"
    account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": ""}
    path = tmp_path / "account.json"
    path.write_text(json.dumps({**account, "private_key_id": ""}))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(path))
    words = (program, "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", port)
    proxy = (sys.executable, "-m", "tests.pipeline.gcs_uploads", proxy_port, f"http://127.0.0.1:{port}")
    async with (
        await child_process.start(*words, "-public-host", f"127.0.0.1:{port}"),
        await child_process.start(*proxy),
    ):
        await eventually(lambda: asyncio.to_thread(_create_gcs_bucket, url), timeout_s=60)
        await asyncio.to_thread(_use, "gs://fleet")
