"""The checkpoint's label: what a checkpoint was made with, so that a wrong one is refused in clear words.

Spark's own errors about a checkpoint that does not fit come late and say little.  So beside Spark's files
lies a small one of ours; `open_` makes it for a new checkpoint and compares it with what is asked of an old
one.  State whose own layout is another all the same (`fleet.Unreadable`) ends the pipeline with `Unusable`.

A checkpoint of an older version of Muster is set aside, and a new one begun: the history knows how far it
got, so reading goes on behind it and no report is missing or doubled; only open windows, and what is known of
silent machines, begin afresh.
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

VERSION = 3  # of the query's shape and of the state; raise it with any change that old state cannot follow
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
        f"move {folder} away to start anew: the history is kept, and reading goes on behind it; "
        "open windows, and what is known of silent machines, begin afresh"
    )


def open_(folder: Path, settings: settings_.PipelineSettings) -> CheckpointLabel:
    """The label of the checkpoint in ``folder``, which is made if there is none."""
    path = folder / LABEL
    try:
        label = msgspec.json.decode(path.read_bytes(), type=CheckpointLabel)
    except FileNotFoundError:
        if folder.exists() and any(folder.iterdir()):
            raise CheckpointUnusable(
                f"{folder} is a checkpoint that Muster did not make", hint=advice(folder)
            ) from None
        return _make(folder, path, settings)
    except msgspec.MsgspecError as error:
        raise CheckpointUnusable(
            f"the checkpoint's label {path} cannot be read: {error}", hint=advice(folder)
        ) from error
    if label.version > VERSION:
        raise CheckpointUnusable(
            f"the checkpoint in {folder} is of version {label.version}, and this is version {VERSION}",
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
                f"the checkpoint in {folder} was made with pipeline.{name} = {was}, and {now} is wanted",
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
