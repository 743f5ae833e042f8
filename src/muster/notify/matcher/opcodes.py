"""The instructions of a compiled address: a stack machine over bitmaps. Shared by both sets of kernels."""

from __future__ import annotations

from typing import Final

BITMAP: Final = 0  # push bitmap number a
RANGE: Final = 1  # push the rows whose code in column a is from b to b + c
AND: Final = 2
OR: Final = 3
NOT: Final = 4  # a, b -> a and not b
FILL: Final = 5  # push all (a = 1) or none (a = 0)
NEXT: Final = 6  # AND with bitmap number a, in place
WITHIN: Final = 7  # AND with the rows whose code in column a is from b to b + c, in place

SPARE: Final = 8  # extra space in the array of ids: kernels write first and count afterwards
DEPTH: Final = 64  # more than any address needs, given the parser's limit on nesting
