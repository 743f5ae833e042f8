"""The driver's commits to the tables of the history: each batch once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from muster.pipeline.history import data_files, delta


class HistoryWriter:
    """The tables of the history, opened when they are first needed."""

    def __init__(self, root: str, run: str, *, epoch: int, keep_s: float) -> None:
        self._root = root
        self._run = run
        self._epoch = epoch
        self._keep_s = keep_s
        self._tables: dict[str, delta.HistoryTable] = {}

    def commit(
        self,
        name: str,
        batch: int,
        files: Iterable[data_files.DataFile],
        positions: Mapping[str, int] | None = None,
    ) -> bool:
        return self._table(name).commit(files, (self._run, batch), positions, epoch=self._epoch)

    def write(
        self, name: str, batch: int, rows: pa.Table, others: Sequence[data_files.DataFile] = ()
    ) -> None:
        """Write rows and commit them with other files, unless the table has this batch already."""
        table = self._table(name)
        table.refresh()
        last = table.transaction_version(self._run)
        if last is None or last < batch:
            stem = f"{self._run}-{self._epoch}-{batch}"
            written = data_files.write(self._root, name, rows, stem).files if rows.num_rows else []
            table.commit([*others, *written], (self._run, batch), epoch=self._epoch)

    def has(self, name: str, run: str, batch: int) -> bool:
        """Whether the batch of a run is in the table."""
        last = delta.position(self._root, name, run)
        return last is not None and last >= batch

    def _table(self, name: str) -> delta.HistoryTable:
        if name not in self._tables:
            self._tables[name] = delta.HistoryTable(self._root, name, keep_s=self._keep_s)
        return self._tables[name]
