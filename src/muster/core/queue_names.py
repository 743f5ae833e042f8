"""Queue names with a special meaning."""

from __future__ import annotations

from typing import Final

TEMPORARY: Final = "temporary:"  # begins the name of a temporary queue; the name of its connection follows
DEAD_LETTERS: Final = "dead-letters"  # destination of messages that could not be delivered
