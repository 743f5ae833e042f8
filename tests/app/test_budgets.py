from __future__ import annotations

import pytest

from muster.app import budgets, domain
from muster.bus import api
from muster.core import errors, messages, subjects
from muster.trust import roles

WARNING, CRITICAL = messages.Level.WARNING, messages.Level.CRITICAL


def use(name: str, used: int, *, refuses: bool = True) -> budgets.Use:
    return budgets.Use(name, used, 100, refuses)


@pytest.mark.parametrize(
    ("used", "refuses", "level"),
    [
        (84, True, None),
        (85, True, WARNING),
        (99, True, CRITICAL),
        (100, False, WARNING),
        (120, True, CRITICAL),
    ],
)
def test_how_loud_a_budget_is(used, refuses, level):
    assert budgets.levels([use("b", used, refuses=refuses)], 0.85).get("b") is level


def test_a_budget_without_a_limit_is_never_full():
    assert budgets.levels([budgets.Use("b", 10**12, 0, True)], 0.85) == {}


def told(before: budgets.Levels, now: budgets.Levels, *uses: budgets.Use) -> list[tuple[str, str, str]]:
    found = budgets.alerts(before, now, uses, at_ms=1)
    return [(alert.about, alert.level.value, alert.state.value) for alert in found]


def test_only_changes_are_told():
    assert told({}, {"b": WARNING}, use("b", 90)) == [("budget:b", "warning", "firing")]
    assert told({"b": WARNING}, {"b": WARNING}, use("b", 91)) == []
    assert told({"b": WARNING}, {"b": CRITICAL}, use("b", 100)) == [("budget:b", "critical", "firing")]
    assert told({"b": CRITICAL}, {}, use("b", 10)) == [("budget:b", "critical", "resolved")]
    assert told({"b": WARNING}, {}) == [("budget:b", "warning", "resolved")]  # the stream was deleted


async def test_a_full_stream_is_an_alert_and_a_counter_and_clears_when_there_is_room(made):
    """On a real broker; the watch looks when the test says so."""
    async with domain.Domain(made()) as running, await running.connect("op", roles.Role.OPERATOR) as bus:
        watch = running.part(budgets.BudgetWatch)
        stream = await bus.stream(
            api.StreamSettings("small", subjects=("topic.s",), max_bytes=1 << 20, on_full=api.OnFull.REFUSE)
        )
        async with await bus.subscribe(subjects.announced("bus", "alert")) as heard:
            await stream.publish_batch([api.Outgoing("topic.s", bytes(100_000)) for _ in range(9)])
            await watch.look()
            alert = messages.decode((await heard.next(timeout_s=5)).data, messages.Alert)
            assert (alert.about, alert.level, alert.state.value) == ("budget:small", WARNING, "firing")
            assert "small" in watch.health().reason
            await stream.publish("topic.s", bytes(140_000))
            await watch.look()
            alert = messages.decode((await heard.next(timeout_s=5)).data, messages.Alert)
            assert alert.level is CRITICAL
            assert running.metrics.value("muster_budget_full_total", budget="small") == 1
            await stream.purge()
            await watch.look()
            alert = messages.decode((await heard.next(timeout_s=5)).data, messages.Alert)
            assert alert.state is messages.AlertState.RESOLVED


async def test_a_full_store_is_an_alert_too(made):
    async with (
        domain.Domain(made(store__max_bytes=1 << 20)) as running,
        await running.connect("op", roles.Role.OPERATOR) as bus,
        await bus.subscribe(subjects.announced("bus", "alert")) as heard,
    ):
        watch = running.part(budgets.BudgetWatch)
        await running.store.put("big", "one", bytes(1_040_000))
        await watch.look()
        alert = messages.decode((await heard.next(timeout_s=5)).data, messages.Alert)
        assert (alert.about, alert.level) == ("budget:store", CRITICAL)
        with pytest.raises(errors.LimitExceeded, match="budget of 1048576 bytes"):
            await running.store.put("big", "two", bytes(100_000))
