"""The checkpoint's label: the parameters of a checkpoint, so that a wrong one is rejected with a clear
message.

Spark detects an incompatible checkpoint late, with an unclear error.  So a small label file is stored beside
Spark's files.  `open_` creates it for a new checkpoint and compares it with the settings for an existing
one.  State whose layout differs nevertheless (`fleet.state.StateUnreadable`) ends the pipeline with
`CheckpointUnusable`.

A checkpoint of an older version of Muster is moved aside, and a new one is created.  Reading continues after
the last position in the history, so no report is missing or duplicated.  Only open windows and the state of
silent machines start from scratch.
"""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

from muster.core import errors
from muster.core.telemetry import log
from muster.pipeline import settings as settings_
from muster.pipeline.history import storage

events = log.EventLog("pipeline")

VERSION = 4  # of the query and its state; increase it with every incompatible change
LABEL = "muster-checkpoint.json"


class CheckpointLabel(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    run: str
    shards: int
    splits: int
    partitions: int
    window_s: float


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
    except msgspec.MsgspecError as error:
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


def has_offsets(folder: str) -> bool:
    """Whether Spark has planned a batch: then it continues from its own offsets."""
    with storage.translated(folder):
        return any(name[:1].isdigit() for name in _names(storage.filesystem(folder), "spark/offsets"))


def _make(folder: str, settings: settings_.PipelineSettings) -> CheckpointLabel:
    label = CheckpointLabel(
        version=VERSION,
        run=time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + f"-{os.getpid()}",
        shards=settings.shards,
        splits=settings.splits,
        partitions=settings.partitions,
        window_s=settings.window_s,
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
