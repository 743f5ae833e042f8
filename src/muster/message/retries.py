"""When a message whose delivery failed is delivered again. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from muster.core import errors

DELAY_S_MAX: Final = 7 * 86_400.0  # of one message; for more, send another one with a delivery time
ERROR_CHARACTERS_MAX: Final = 1_000  # of the last error, in the reason of a dead letter


@dataclass(frozen=True, slots=True)
class Retry:
    """Wait before a message is delivered again, and when it becomes a dead letter.

    >>> [Retry(delay_s=1, delay_s_max=5).delay_after(failures) for failures in (1, 2, 3, 4)]
    [1.0, 2.0, 4.0, 5]
    """

    attempts: int = 0  # deliveries after which it is a dead letter; 0: as the settings of the queue say
    delay_s: float = 1.0  # before the second delivery; 0: at once, before later messages
    backoff: float = 2.0  # factor of the delay for each further one
    delay_s_max: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 0 or not 0 <= self.delay_s <= DELAY_S_MAX or not 1 <= self.backoff <= 100:
            raise errors.InvalidInput(
                f"a retry has 0 attempts or more, a delay_s of 0 to {DELAY_S_MAX:g}, a backoff of 1 to 100"
            )
        if not 0 <= self.delay_s_max <= DELAY_S_MAX:
            raise errors.InvalidInput(f"delay_s_max is 0 to {DELAY_S_MAX:g}, not {self.delay_s_max:g}")

    def delay_after(self, failures: int) -> float:
        """The delay in seconds after this number of failed deliveries."""
        factor = self.backoff ** min(failures - 1, 100)
        return min(self.delay_s * factor, max(self.delay_s_max, self.delay_s))


def described(text: str) -> str:
    """What the reason of a dead letter contains of a text."""
    return errors.sendable(text[:ERROR_CHARACTERS_MAX])


AT_ONCE: Final = Retry(delay_s=0.0)  # as JMS requires
