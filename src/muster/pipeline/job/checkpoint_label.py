"""The checkpoint's label: the parameters of a checkpoint, so that a wrong one is rejected with a clear
message.

Spark detects an incompatible checkpoint late, with an unclear error.  So a small label file is stored beside
Spark's files.  `open_` creates it for a new checkpoint and compares it with the settings for an existing
one.  State whose layout differs nevertheless (`fleet.state.StateUnreadable`) ends the pipeline with
`CheckpointUnusable`.

A checkpoint of an older version of Muster is moved aside, and a new one is created.  Reading continues after
the last position in the history, so no report is missing or duplicated.  Only open windows and the state of
silent machines start from scratch.  `renew` does the same for streams that were restored without their
checkpoint: the label then records where reading continues.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

import msgspec

from muster.core import errors, files
from muster.core.telemetry import log
from muster.pipeline import settings as settings_
from muster.pipeline.history import storage

events = log.EventLog("pipeline")

VERSION = 5  # of the query and its state; increase it with every incompatible change
LABEL = "muster-checkpoint.json"
_SCHEMA_PATH = re.compile(r'"file:[^"]*?/(state/\d+/_stateSchema/[^"]*)"')
SPARK = "spark"  # the folder of Spark's own files
STATE_NAME = "alerts.json"  # the alert state, which belongs to a batch (`batch_commit.CommitState`)


class CheckpointLabel(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    run: str
    shards: int
    splits: int
    partitions: int
    window_s: float
    folder: str = SPARK  # of Spark's files
    after: dict[str, int] = {}  # streams whose reading starts after this sequence, not that of the history


class CheckpointUnusable(errors.Conflict):
    code = "checkpoint-unusable"


def advice(folder: str) -> str:
    return (
        f"move {folder} away to start with a new checkpoint: the history is kept and continued; "
        "open windows and the state of silent machines start from scratch"
    )


def open_(folder: str, settings: settings_.PipelineSettings) -> CheckpointLabel:
    """The label of the checkpoint in ``folder`` (a path or URL), which is created if there is none."""
    path = f"{folder}/{LABEL}"
    with storage.translated(path):
        store = storage.filesystem(folder)
        content = _read(store, LABEL)
        used = content is None and bool(_names(store, ""))
    if used:
        raise CheckpointUnusable(
            f"{folder} is a checkpoint that Muster did not create", hint=advice(folder)
        ) from None
    if content is None:
        return _make(folder, settings)
    try:
        label = msgspec.json.decode(content, type=CheckpointLabel)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointUnusable(
            f"the checkpoint's label {path} cannot be read: {error}", hint=advice(folder)
        ) from error
    if label.version > VERSION:
        raise CheckpointUnusable(
            f"the checkpoint in {folder} has version {label.version}, expected {VERSION}",
            hint=f"run a newer Muster, or {advice(folder)}",
        )
    if label.version < VERSION:
        local = storage.local_path(folder)
        if local is None:  # a folder of an object store cannot be renamed
            raise CheckpointUnusable(
                f"the checkpoint in {folder} has version {label.version}, expected {VERSION}",
                hint=advice(folder),
            )
        aside = local.with_name(f"{local.name}-of-version-{label.version}-{label.run}")
        local.rename(aside)
        events.warning("checkpoint-set-aside", version=label.version, kept_in=str(aside))
        return _make(folder, settings)
    for name in ("shards", "splits", "partitions", "window_s"):
        was, now = getattr(label, name), getattr(settings, name)
        if was != now:
            raise CheckpointUnusable(
                f"the checkpoint in {folder} has pipeline.{name} = {was}, but {now} is configured",
                hint=f"set pipeline.{name} = {was}, or {advice(folder)}",
            )
    return label


def renew(folder: str, settings: settings_.PipelineSettings, after: dict[str, int]) -> CheckpointLabel:
    """Start a new checkpoint in the same folder, also in an object store; the files of the old one remain."""
    run = _new_run()
    return _make(folder, settings, run=run, spark=f"{SPARK}-{run}", after=after)


def offsets(folder: str, label: CheckpointLabel) -> dict[str, int] | None:
    """The positions of the last batch that Spark planned, by stream; None if it planned none."""
    path = f"{label.folder}/offsets"
    with storage.translated(f"{folder}/{path}"):
        store = storage.filesystem(folder)
        batches = [int(name) for name in _names(store, path) if name.isdigit()]
        if not batches:
            return None
        content = _read(store, f"{path}/{max(batches)}")
    return parse_offsets(content or b"", f"{folder}/{path}/{max(batches)}")


def parse_offsets(content: bytes, path: str) -> dict[str, int]:
    """A file of Spark's log of offsets: its version, metadata, and the offset of each source, in lines."""
    try:
        return msgspec.json.decode(content.splitlines()[2], type=dict[str, int])
    except (IndexError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointUnusable(f"Spark's offsets {path} cannot be read: {error}") from error


def relocate(folder: str, label: CheckpointLabel) -> None:
    """Correct the absolute paths that Spark stores in a local checkpoint, if its folder was moved.

    They are in the metadata of its operators: the files with the schema of the state.
    """
    local = storage.local_path(folder)
    if local is None:
        return
    spark = local / label.folder
    root = f"file:{spark}"  # as Spark writes it, without escapes
    for path in spark.glob("state/*/_metadata/**/*"):
        if path.is_file() and not path.name.startswith("."):
            content = path.read_text()
            corrected = _SCHEMA_PATH.sub(lambda match: f'"{root}/{match[1]}"', content)
            if corrected != content:
                path.with_name(f".{path.name}.crc").unlink(missing_ok=True)  # its checksum
                files.write(path, corrected.encode(), mode=files.PUBLIC)


def _new_run() -> str:
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + f"-{secrets.token_hex(3)}"


def _make(
    folder: str,
    settings: settings_.PipelineSettings,
    *,
    run: str = "",
    spark: str = SPARK,
    after: dict[str, int] | None = None,
) -> CheckpointLabel:
    label = CheckpointLabel(
        version=VERSION,
        run=run or _new_run(),
        shards=settings.shards,
        splits=settings.splits,
        partitions=settings.partitions,
        window_s=settings.window_s,
        folder=spark,
        after=after or {},
    )
    storage.replace_file(folder, LABEL, msgspec.json.encode(label))
    return label


def _read(store: Any, path: str) -> bytes | None:
    try:
        with store.open_input_stream(path) as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        return None


def _names(store: Any, folder: str) -> list[str]:
    from pyarrow import fs

    listed = store.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    return [info.base_name for info in listed]
