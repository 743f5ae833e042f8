"""A machine has as many managers as their measured load requires."""

from __future__ import annotations

from muster.app.supervisor import manager_count


class Machine:
    """Managers that share a load; each process has its own counter of time."""

    def __init__(self, least: int, most: int) -> None:
        self.counted = manager_count.ManagerCount(least, most)
        self.now_s, self.active_ns = 0.0, dict.fromkeys(range(least), 0)

    def run(self, cores: float, looks: int) -> int:
        for _ in range(looks):
            self.now_s += manager_count.LOOK_S
            for pid in self.active_ns:
                self.active_ns[pid] += int(cores / len(self.active_ns) * manager_count.LOOK_S * 1e9)
            due = self.counted.look(self.now_s, self.active_ns)
            self.active_ns = {pid: self.active_ns.get(pid, 0) for pid in range(due)}
        return len(self.active_ns)


def test_busy_managers_get_more_until_none_is_busy():
    machine = Machine(1, 8)
    assert machine.run(0.5, 20) == 1
    assert machine.run(2.0, 60) == 4  # 0.5 of a core each
    assert machine.run(2.0, 200) == 4, "the count does not swing"


def test_it_has_no_more_managers_than_cores_and_returns_to_the_least():
    machine = Machine(2, 3)
    assert machine.run(9.0, 60) == 3
    assert machine.run(0.1, 2 * manager_count.CALM_LOOKS + 5) == 2


def test_a_short_load_starts_none():
    machine = Machine(2, 8)
    for _ in range(5):
        machine.run(4.0, manager_count.BUSY_LOOKS - 1)
        assert machine.run(0.2, 2) == 2


def test_a_manager_that_was_restarted_is_not_taken_for_a_load():
    machine = Machine(1, 8)
    machine.run(0.1, 3)
    machine.active_ns = {77: 10**12}
    machine.now_s += manager_count.LOOK_S
    assert machine.counted.look(machine.now_s, machine.active_ns) == 1
