"""A simulated worm among web servers. Pure and seeded.

The scenario of the selective-notification paper: servers in several regions run different versions of the
same software.  A worm on one server attacks others at random and infects those with a vulnerable version.  A
server is healthy, infected (it attacks others), isolated (it cannot) or patched (it is safe).

A farm holds a share of all servers, so several processes can simulate one epidemic: `attempts` returns the
servers that its infected ones attack, in any farm, and `struck` applies attacks on its own servers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from muster.core import errors

Indices = npt.NDArray[np.int64]


class ServerCondition(enum.IntEnum):
    HEALTHY = 0
    INFECTED = 1
    ISOLATED = 2
    PATCHED = 3

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class WormPlan:
    """The whole fleet, and the parameters of the worm."""

    servers: int = 10_000
    regions: tuple[str, ...] = ("northwest", "northeast", "southwest", "southeast")
    versions: tuple[str, ...] = ("4.0", "5.0", "6.0")
    shares: tuple[float, ...] = (0.25, 0.40, 0.35)  # of servers by version
    holes: tuple[str, ...] = ("4.0", "5.0")  # vulnerable versions
    first_infected: int = 4
    attempts_s: float = 0.15  # attacks per second of each infected server
    seed: int = 1

    def __post_init__(self) -> None:
        if self.servers < 1 or not 0 < self.first_infected <= self.servers:
            raise errors.InvalidInput("a fleet needs servers, and at least one of them is infected first")
        if len(self.shares) != len(self.versions) or abs(sum(self.shares) - 1) > 1e-6:
            raise errors.InvalidInput("there must be one share for each version, and their sum must be 1")

    def name(self, number: int) -> str:
        return f"web-{number:07}"

    @staticmethod
    def number(name: str) -> int:
        return int(name.rpartition("-")[2])


class WormFarm:
    """The servers ``first`` to ``first + count`` of a plan."""

    def __init__(self, plan: WormPlan, first: int = 0, count: int | None = None) -> None:
        self.plan = plan
        self.first = first
        self.count = plan.servers - first if count is None else count
        self._chance = np.random.default_rng((plan.seed, 5, first))
        # Drawn for the whole fleet, so a server is the same in whichever process it is simulated.
        all_of = np.random.default_rng((plan.seed, 4))
        regions = all_of.integers(0, len(plan.regions), plan.servers)
        versions = all_of.choice(len(plan.versions), plan.servers, p=plan.shares)
        with_hole = np.isin(versions, [plan.versions.index(version) for version in plan.holes])
        candidates = np.flatnonzero(with_hole)
        zero = all_of.permutation(candidates)[: plan.first_infected]
        here = slice(first, first + self.count)
        self.region = regions[here]
        self.version = versions[here]
        self.has_hole = with_hole[here].copy()
        self.condition = np.zeros(self.count, np.uint8)
        self.fallen = 0  # servers that were ever infected
        self._zero = zero[(zero >= first) & (zero < first + self.count)] - first

    @property
    def names(self) -> list[str]:
        return [self.plan.name(number) for number in range(self.first, self.first + self.count)]

    def release(self) -> Indices:
        """Release the worm: infect the first servers."""
        return self._take(self._zero)

    def attempts(self, seconds: float) -> Indices:
        """Return the numbers in the fleet of the servers that infected ones here attack in that time."""
        infected = int((self.condition == ServerCondition.INFECTED).sum())
        tries = int(self._chance.poisson(infected * self.plan.attempts_s * seconds))
        return self._chance.integers(0, self.plan.servers, tries)

    def struck(self, numbers: Indices) -> Indices:
        """Apply attacks on servers here; return the positions of those that were infected."""
        places = np.unique(numbers) - self.first
        return self._take(places[(places >= 0) & (places < self.count)])

    def _take(self, places: Indices) -> Indices:
        fallen: Indices = places[self.has_hole[places] & (self.condition[places] == ServerCondition.HEALTHY)]
        self.condition[fallen] = ServerCondition.INFECTED
        self.fallen += len(fallen)
        return fallen

    def isolate(self, places: Sequence[int]) -> None:
        """Isolate servers. A healthy one may be isolated too; a patched one stays patched."""
        chosen = np.asarray(places, np.int64)
        self.condition[chosen[self.condition[chosen] != ServerCondition.PATCHED]] = ServerCondition.ISOLATED

    def patch(self, places: Sequence[int]) -> None:
        """Patch servers: clean them and install a safe version. An infected server must be isolated first."""
        chosen = np.asarray(places, np.int64)
        self.condition[chosen[self.condition[chosen] != ServerCondition.INFECTED]] = ServerCondition.PATCHED

    @property
    def at_risk(self) -> npt.NDArray[np.bool_]:
        at_risk: npt.NDArray[np.bool_] = self.has_hole & (self.condition == ServerCondition.HEALTHY)
        return at_risk

    def tally(self) -> dict[str, Any]:
        """Count the servers in each condition, and the infected ones by region."""
        counts = np.bincount(self.condition, minlength=len(ServerCondition))
        infected = np.bincount(
            self.region[self.condition == ServerCondition.INFECTED], minlength=len(self.plan.regions)
        )
        return {
            **{condition.word: int(counts[condition]) for condition in ServerCondition},
            "at_risk": int(self.at_risk.sum()),
            "fallen": self.fallen,
            "regions": dict(zip(self.plan.regions, infected.tolist(), strict=True)),
        }


def spread_unchecked(plan: WormPlan, seconds: float, *, step_s: float = 0.5) -> list[int]:
    """Return the number of infected servers after each step without any reaction."""
    farm = WormFarm(plan)
    farm.release()
    infected = []
    for _ in range(round(seconds / step_s)):
        farm.struck(farm.attempts(step_s))
        infected.append(int((farm.condition == ServerCondition.INFECTED).sum()))
    return infected
