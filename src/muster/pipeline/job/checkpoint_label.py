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
from pathlib import Path

import msgspec

from muster.core import errors
from muster.core.telemetry import log
from muster.pipeline import settings as settings_

events = log.EventLog("pipeline")

VERSION = 3  # of the query and its state; increase it with every incompatible change
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


def advice(folder: Path) -> str:
    return (
        f"move {folder} away to start with a new checkpoint: the history is kept and continued; "
        "open windows and the state of silent machines start from scratch"
    )


def open_(folder: Path, settings: settings_.PipelineSettings) -> CheckpointLabel:
    """The label of the checkpoint in ``folder``, which is created if there is none."""
    path = folder / LABEL
    try:
        label = msgspec.json.decode(path.read_bytes(), type=CheckpointLabel)
    except FileNotFoundError:
        if folder.exists() and any(folder.iterdir()):
            raise CheckpointUnusable(
                f"{folder} is a checkpoint that Muster did not create", hint=advice(folder)
            ) from None
        return _make(folder, path, settings)
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
        aside = folder.with_name(f"{folder.name}-of-version-{label.version}-{label.run}")
        folder.rename(aside)
        events.warning("checkpoint-set-aside", version=label.version, kept_in=str(aside))
        return _make(folder, path, settings)
    for name in ("shards", "splits", "partitions", "window_s"):
        was, now = getattr(label, name), getattr(settings, name)
        if was != now:
            raise CheckpointUnusable(
                f"the checkpoint in {folder} has pipeline.{name} = {was}, but {now} is configured",
                hint=f"set pipeline.{name} = {was}, or {advice(folder)}",
            )
    return label


def _make(folder: Path, path: Path, settings: settings_.PipelineSettings) -> CheckpointLabel:
    label = CheckpointLabel(
        version=VERSION,
        run=time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + f"-{os.getpid()}",
        shards=settings.shards,
        splits=settings.splits,
        partitions=settings.partitions,
        window_s=settings.window_s,
    )
    folder.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    with fresh.open("wb") as file:
        file.write(msgspec.json.encode(label))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    return label
