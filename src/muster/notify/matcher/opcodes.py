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
# In place: of the rows whose code in column a is b % 256, keep those whose number, in column b // 256 of the
# numbers, is below c (or at least c); for floats c has the bits of the bound.
BELOW: Final = 8
FROM: Final = 9
FLOAT_BELOW: Final = 10
FLOAT_FROM: Final = 11
COMPARING: Final = frozenset((BELOW, FROM, FLOAT_BELOW, FLOAT_FROM))

SPARE: Final = 8  # extra space in the array of ids: kernels write first and count afterwards
DEPTH: Final = 64  # more than any address needs, given the parser's limit on nesting
