"""The checkpoint's label: its version and identity, so that a wrong one is rejected with a clear message.

Spark detects an incompatible checkpoint late, with an unclear error.  So a small label file is stored beside
Spark's files.  `open_` creates it for a new checkpoint and checks it for an existing one.  State whose layout
differs nevertheless (`fleet.state.StateUnreadable`) ends the pipeline with
`CheckpointUnusable`.

A checkpoint of an older version of Muster is moved aside, and a new one is created.  Reading continues after
the last position in the history, so no report is missing or duplicated.  Only open windows and the state of
silent machines start from scratch.  `renew` does the same for streams that were restored without their
checkpoint: the label then records where reading continues.
"""

from __future__ import annotations

import secrets
import time

import msgspec

from muster.core import errors
from muster.core.telemetry import log
from muster.pipeline.history import storage

events = log.EventLog("pipeline")

VERSION = 6  # of the query and its state; increase it with every incompatible change
LABEL = "muster-checkpoint.json"


class CheckpointLabel(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    run: str
    after: dict[str, int] = {}  # streams whose reading starts after this sequence, not that of the history


class CheckpointUnusable(errors.Conflict):
    code = "checkpoint-unusable"


def advice(folder: str) -> str:
    return (
        f"move {folder} away to start with a new checkpoint: the history is kept and continued; "
        "open windows and the state of silent machines start from scratch"
    )


def open_(folder: str) -> CheckpointLabel:
    """The label of the checkpoint in ``folder`` (a path or URL), which is created if there is none."""
    path = f"{folder}/{LABEL}"
    with storage.translated(path):
        store = storage.filesystem(folder)
        content = storage.read_file(store, LABEL)
        listed = storage.names(store, "") if content is None else []
        used = any(not name.startswith(storage.CHECK_PREFIX) for name in listed)
    if used:
        raise CheckpointUnusable(
            f"{folder} is a checkpoint that Muster did not create", hint=advice(folder)
        ) from None
    if content is None:
        return renew(folder)
    try:
        label = msgspec.json.decode(content, type=CheckpointLabel)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
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
        return renew(folder)
    return label


def renew(folder: str, after: dict[str, int] | None = None) -> CheckpointLabel:
    """Start a new checkpoint in the same folder, also in an object store."""
    label = CheckpointLabel(
        version=VERSION,
        run=time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + f"-{secrets.token_hex(3)}",
        after=after or {},
    )
    storage.replace_file(folder, LABEL, msgspec.json.encode(label))
    return label
