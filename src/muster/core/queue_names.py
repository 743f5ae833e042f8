"""Names of queues that mean something by themselves."""

from __future__ import annotations

from typing import Final

TEMPORARY: Final = "temporary:"  # begins the name of a temporary queue; the name of its connection follows
DEAD_LETTERS: Final = "dead-letters"  # where messages go that no consumer could take
