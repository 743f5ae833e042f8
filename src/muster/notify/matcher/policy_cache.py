"""A cache of checked policies and their canonical forms, for many receivers that join with the same ones.

The texts are concatenated, not kept as strings: a hundred thousand strings would fragment the heap, and the
process would stay as large after they are discarded.
"""

from __future__ import annotations

import array

import numpy as np

from muster.notify.matcher import kernels_numpy, name_table


class PolicyCache:
    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._texts = name_table.NameTable(kernels_numpy)
        self._kept = bytearray()
        self.bytes = 0  # total size
        self._ends = array.array("q", [0])

    def get(self, text: str) -> str | None:
        row = self._texts.row(text)
        return None if row < 0 else self._kept[self._ends[row] : self._ends[row + 1]].decode()

    def add(self, text: str, kept: str) -> None:
        """Add a new policy."""
        self._texts.add([text], np.array([len(self._ends) - 1]))
        self._kept += kept.encode()
        self._ends.append(len(self._kept))
        # The original text counts too: with spaces it may be much longer than the canonical form.
        self.bytes += len(text) + len(kept)
