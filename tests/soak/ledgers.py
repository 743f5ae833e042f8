"""What the domain acknowledged, against what arrived. Pure.

A send that failed is in doubt: it may arrive, at most once. Everything acknowledged has to arrive. A second
arrival is an error unless it is marked as a repetition, as JMS allows after a failure.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DeliveryLedger:
    """Numbered messages or events of one kind, sent to one receiver."""

    name: str
    accepted_at_s: dict[int, float] = field(default_factory=dict)
    in_doubt: set[int] = field(default_factory=set)
    received_at_s: dict[int, float] = field(default_factory=dict)
    marked: int = 0  # repetitions with a mark
    doubled: list[int] = field(default_factory=list)
    delay_max_s: float = 0.0  # from the acknowledgement to the arrival

    def accepted(self, number: int, at_s: float) -> None:
        self.accepted_at_s[number] = at_s
        self.in_doubt.discard(number)

    def failed(self, number: int) -> None:
        self.in_doubt.add(number)

    def received(self, number: int, at_s: float, *, repeated: bool = False) -> None:
        if number in self.received_at_s:
            if repeated:
                self.marked += 1
            else:
                self.doubled.append(number)
            return
        self.received_at_s[number] = at_s
        if number in self.accepted_at_s:
            self.delay_max_s = max(self.delay_max_s, at_s - self.accepted_at_s[number])

    def overdue(self, before_s: float) -> list[int]:
        """Those acknowledged before this time that have not arrived."""
        accepted = list(self.accepted_at_s.items())  # a thread may add to it meanwhile
        return [number for number, at_s in accepted if at_s < before_s and number not in self.received_at_s]

    def violations(self) -> list[str]:
        """At the end, after everything had time to arrive."""
        lost = sorted(self.accepted_at_s.keys() - self.received_at_s.keys())
        sent = self.accepted_at_s.keys() | self.in_doubt
        unknown = sorted(self.received_at_s.keys() - sent)
        problems = (("lost", lost), ("doubled", sorted(self.doubled)), ("never sent", unknown))
        return [
            f"{self.name}: {len(numbers)} {what}: {numbers[:10]}" for what, numbers in problems if numbers
        ]


@dataclass
class WriteLedger:
    """Increasing numbers written to keys, each by one writer."""

    name: str
    accepted: dict[str, int] = field(default_factory=dict)
    attempted: dict[str, int] = field(default_factory=dict)
    writes: int = 0
    reads: int = 0
    problems: list[str] = field(default_factory=list)

    def begin(self, key: str) -> int:
        """The next number to write."""
        self.attempted[key] = self.attempted.get(key, 0) + 1
        return self.attempted[key]

    def wrote(self, key: str, number: int) -> None:
        self.accepted[key] = number
        self.writes += 1

    def floor(self, key: str) -> int:
        """The least number that a read which begins now may return."""
        return self.accepted.get(key, 0)

    def read(self, key: str, number: int, floor: int) -> None:
        self.reads += 1
        if not floor <= number <= self.attempted.get(key, 0):
            self.problems.append(f"{key} is {number}, not {floor} to {self.attempted.get(key, 0)}")

    def violations(self) -> list[str]:
        return [f"{self.name}: {problem}" for problem in self.problems]
