"""The state of the driver that survives it, besides Spark's checkpoint: alerts and what is to be sent.

It is stored beside a local checkpoint, otherwise in the history, so that a new checkpoint does not lose
it.  Each driver writes a file of its own, named by its epoch, and the next one reads the newest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from muster.core import errors, messages
from muster.pipeline.alerts import tracker
from muster.pipeline.history import storage

STATE_VERSION = 1  # of `CommitState`
_NAME = re.compile(r"alerts(?:-(\d+))?\.json")  # without an epoch: of the first release


class RecordedAlerts(msgspec.Struct, frozen=True):
    """The transaction of `alerts` that contains the first unrecorded alerts, once it is committed."""

    run: str
    batch: int
    count: int


class CommitState(msgspec.Struct):
    alerts: tracker.AlertTrackerState
    unsent: list[tracker.AlertNotification] = msgspec.field(default_factory=list)
    unpublished: list[messages.Alert] = msgspec.field(default_factory=list)
    unrecorded: list[messages.Alert] = msgspec.field(default_factory=list)
    recording: RecordedAlerts | None = None
    run: str = ""  # the checkpoint whose state the alerts follow
    batch: tuple[str, int] | None = None  # the last one that was applied: its checkpoint and number
    clock_ms: int = 0  # the broker's clock at the newest message read
    version: int = STATE_VERSION


class CommitStateStore:
    """The files of the state in a folder or an object store."""

    def __init__(self, root: str, epoch: int) -> None:
        self._root = root
        self._epoch = epoch

    @property
    def name(self) -> str:
        return f"alerts-{self._epoch:08}.json"

    def load(self) -> CommitState:
        with storage.translated(self._root):
            store = storage.filesystem(self._root)
            names = state_names(storage.names(store, ""))
            content = storage.read_file(store, names[-1]) if names else None
        if content is None:
            return CommitState(tracker.AlertTrackerState())
        path = f"{self._root}/{names[-1]}"
        try:
            stored = msgspec.json.decode(content, type=CommitState)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise errors.Conflict(
                f"the alert state {path} cannot be read: {error}",
                hint="move the file away to start with an empty state",
            ) from error
        if stored.version > STATE_VERSION:
            raise errors.Conflict(
                f"the alert state {path} has version {stored.version}, expected {STATE_VERSION}",
                hint="run a newer Muster, or move the file away to start with an empty state",
            )
        return stored

    def save(self, state: bytes) -> None:
        """``state``: a `CommitState` in JSON."""
        storage.replace_file(self._root, self.name, state)

    def remove_before(self) -> None:
        """Remove the files of earlier drivers."""
        with storage.translated(self._root):
            store = storage.filesystem(self._root)
            names = state_names(storage.names(store, ""))
            if self.name in names:  # otherwise it could not be saved yet, and the former ones are needed
                for name in names[: names.index(self.name)]:
                    store.delete_file(name)


def state_names(names: Iterable[str]) -> list[str]:
    """Those of files with the state, that of the latest driver last."""
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    return [match[0] for match in sorted(matches, key=lambda match: int(match[1] or 0))]
