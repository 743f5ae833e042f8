"""Policies that were checked, and as they are kept, while many join with the same ones.

End to end, not as strings: a hundred thousand of those, thrown away later, would leave the process as large
as they had made it, because what stays lies between them.
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
        self.bytes = 0  # of all this
        self._ends = array.array("q", [0])

    def get(self, text: str) -> str | None:
        row = self._texts.row(text)
        return None if row < 0 else self._kept[self._ends[row] : self._ends[row + 1]].decode()

    def add(self, text: str, kept: str) -> None:
        """One that is not there yet."""
        self._texts.add([text], np.array([len(self._ends) - 1]))
        self._kept += kept.encode()
        self._ends.append(len(self._kept))
        # Of what was said too: blanks make a long text of what is kept as a short one.
        self.bytes += len(text) + len(kept)
