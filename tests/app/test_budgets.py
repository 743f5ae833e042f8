from __future__ import annotations

import asyncio
import contextlib
import shutil
import types
from typing import Any

import pytest

from muster.app import domain
from muster.app.operations import retention
from muster.bus import api
from muster.core import errors, messages, subjects
from muster.core.settings import domain as domain_settings
from muster.core.telemetry import log, metrics
from muster.supervision import tasks
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from muster.web.data import read_model as source_

WARNING, CRITICAL = messages.Severity.WARNING, messages.Severity.CRITICAL


def use(name: str, used: int, *, refuses: bool = True) -> retention.BudgetUsage:
    return retention.BudgetUsage(name, used, 100, refuses)


@pytest.mark.parametrize(
    ("used", "refuses", "severity"),
    [
        (84, True, None),
        (85, True, WARNING),
        (99, True, CRITICAL),
        (100, False, WARNING),
        (120, True, CRITICAL),
    ],
)
def test_how_loud_a_budget_is(used, refuses, severity):
    assert retention.usage_severities([use("b", used, refuses=refuses)], 0.85).get("b") is severity


def test_a_budget_without_a_limit_is_never_full():
    assert retention.usage_severities([retention.BudgetUsage("b", 10**12, 0, True)], 0.85) == {}


def alert_transitions(
    before: retention.Severities, now: retention.Severities, *uses: retention.BudgetUsage
) -> list[tuple[str, str, str]]:
    alerts = retention.alerts(before, now, uses, at_ms=1)
    return [(alert.about, alert.severity.value, alert.state.value) for alert in alerts]


def test_only_changes_are_reported():
    assert alert_transitions({}, {"b": WARNING}, use("b", 90)) == [("budget:b", "warning", "firing")]
    assert alert_transitions({"b": WARNING}, {"b": WARNING}, use("b", 91)) == []
    assert alert_transitions({"b": WARNING}, {"b": CRITICAL}, use("b", 100)) == [
        ("budget:b", "critical", "firing")
    ]
    assert alert_transitions({"b": CRITICAL}, {}, use("b", 10)) == [("budget:b", "critical", "resolved")]
    assert alert_transitions({"b": WARNING}, {}) == [
        ("budget:b", "warning", "resolved")
    ]  # the stream was deleted


async def test_a_full_stream_is_an_alert_and_a_counter_and_clears_when_there_is_room(made):
    """On a real broker; the test triggers each check."""
    async with domain.Domain(made()) as running, await running.connect("op", roles.Role.OPERATOR) as bus:
        watch = running.component(retention.RetentionMonitor)
        stream = await bus.stream(
            api.StreamSettings(
                "small", subjects=("topic.s",), max_bytes=1 << 20, on_full=api.FullPolicy.REFUSE
            )
        )
        async with await bus.subscribe(subjects.to_all("bus", "alert")) as subscription:
            await stream.publish_batch([api.OutgoingMessage("topic.s", bytes(100_000)) for _ in range(9)])
            await watch.check()
            alert = messages.decode((await subscription.next(timeout_s=30)).data, messages.Alert)
            assert (alert.about, alert.severity, alert.state.value) == ("budget:small", WARNING, "firing")
            assert "small" in watch.health().reason
            await stream.publish("topic.s", bytes(140_000))
            await watch.check()
            alert = messages.decode((await subscription.next(timeout_s=30)).data, messages.Alert)
            assert alert.severity is CRITICAL
            assert running.metrics.value("muster_budget_full_total", budget="small") == 1
            await stream.purge()
            await watch.check()
            alert = messages.decode((await subscription.next(timeout_s=30)).data, messages.Alert)
            assert alert.state is messages.AlertState.RESOLVED


class Reach:
    """How the dashboard's process reaches the domain of a test."""

    def __init__(self, running: domain.Domain) -> None:
        self.connect = running.connect

    async def place(self) -> str:
        return "here"


async def test_an_alert_from_before_the_dashboard_connected_is_shown_and_ends(made, tmp_path):
    async with (
        domain.Domain(made()) as running,
        await running.connect("op", roles.Role.OPERATOR) as bus,
    ):
        watch = running.component(retention.RetentionMonitor)
        big = await bus.stream(api.StreamSettings("big", ("topic.big",), max_bytes=1 << 20))
        await big.publish("topic.big", bytes(1_040_000))
        await watch.check()  # announced, and nothing listens yet
        source = source_.ReadModel(Reach(running), history=str(tmp_path), domain="local")
        reading = asyncio.create_task(source.feed.run())

        async def about() -> list[str]:
            with contextlib.suppress(errors.NotConnected):
                return [alert.about for alert in await source.alerts() if alert.rule == retention.RULE]
            return ["not connected"]

        async def shown() -> bool:
            return "budget:big" in await about()

        async def gone() -> bool:
            return not {"budget:big", "not connected"}.intersection(await about())

        try:
            await eventually(shown)
            source.feed._lost()  # what is announced while the dashboard is away, it does not hear
            await big.purge()
            await watch.check()
            await eventually(gone)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await source.feed.cache.close()


def test_every_stream_of_ours_has_a_budget_in_the_settings(made):
    ours = {name for names in roles.STREAMS.values() for name in names}
    settings = made().retention
    assert ours <= set(settings.streams(len(roles.STREAMS["message"])))
    for logs in (1, 4):  # they share the budget of messages
        budgets = settings.streams(logs).values()
        assert settings.reserved_bytes() == sum(budget.max_bytes for budget in budgets)


def test_which_streams_are_to_be_changed(made):
    expected = made(retention__reports__max_bytes="2GiB")
    actual = [
        api.StreamBudget("reports", 0, 4 << 30, 0, api.FullPolicy.DROP_OLDEST, 86400.0, 1),
        api.StreamBudget("alerts", 0, 256 << 20, 0, api.FullPolicy.DROP_OLDEST, 30 * 86400.0, 1),
        api.StreamBudget("of-a-user", 0, 1 << 20, 0, api.FullPolicy.DROP_OLDEST, 0.0, 1),
    ]
    assert [name for name, *_ in retention.drifted_streams(actual, expected)] == ["reports"]


async def test_streams_have_the_configured_budgets_whichever_process_created_them(made):
    expected = made(
        retention__reports__max_bytes="8MiB",
        retention__reports__on_full="refuse",
        retention__reports__max_age_s="1h",
    )
    async with domain.Domain(expected) as running, await running.connect("c", roles.Role.CHANNEL) as bus:
        others_idea = api.StreamSettings(
            "reports", ("muster.monitor.from.*.batch.root.*",), max_bytes=1 << 20
        )
        stream = await bus.stream(others_idea)
        watch = running.component(retention.RetentionMonitor)
        await watch.check()
        await bus.stream(others_idea)  # who opens it again changes nothing
        (budget,) = [
            budget_row for budget_row in await watch._context.bus.budgets() if budget_row.stream == "reports"
        ]
        assert (budget.limit_bytes, budget.max_age_s, budget.on_full) == (
            8 << 20,
            3600.0,
            api.FullPolicy.REFUSE,
        )

        # A full budget: an error for writers, an alert, a counter, and all processes continue.
        async with (
            await running.connect("op", roles.Role.OPERATOR) as op,
            await op.subscribe(subjects.to_all("bus", "alert")) as subscription,
        ):
            subject = "muster.monitor.from.c.batch.root.0"
            await stream.publish_batch([api.OutgoingMessage(subject, bytes(500_000)) for _ in range(16)])
            with pytest.raises(errors.LimitExceeded):
                await stream.publish(subject, bytes(500_000))
            await watch.check()
            alert = messages.decode((await subscription.next(timeout_s=30)).data, messages.Alert)
            assert (alert.about, alert.severity) == (
                "budget:reports",
                CRITICAL if _is_full(watch) else WARNING,
            )
            assert running.ready
            assert bus.statistics().refused_full == 1


def _is_full(watch: retention.RetentionMonitor) -> bool:
    rows = watch.health().facts["budgets"]
    return any(row["name"] == "reports" and row["used_ratio"] >= retention.FULL for row in rows)


async def test_the_fullest_disk_below_the_folder_counts(made, monkeypatch: pytest.MonkeyPatch):
    async with domain.Domain(made()) as running:
        free = shutil.disk_usage(running.folder.root)
        usage = free._replace(free=0)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage if path.name == "brokers" else free)
        await running.component(retention.RetentionMonitor).check()
        budgets = {row["name"]: row["used_ratio"] for row in (await running.status())["budgets"]}
        assert budgets["disk"] == 1.0


async def test_files_that_a_part_keeps_are_watched_too(made, tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    async with domain.Domain(made()) as running, await running.connect("op", roles.Role.OPERATOR) as bus:
        watch = running.component(retention.RetentionMonitor)
        watch.watch_folder("history", folder, 1_000)
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_bytes(bytes(4_000_000))
        async with await bus.subscribe(subjects.to_all("bus", "alert")) as subscription:
            await watch.check()
            alert = messages.decode((await subscription.next(timeout_s=30)).data, messages.Alert)
            assert (alert.about, alert.severity) == ("budget:history", WARNING)
        assert running.metrics.value("muster_budget_full_total", budget="history") == 1


@pytest.mark.virtual_time
async def test_the_start_does_not_wait_long_for_streams_without_a_leader(monkeypatch: pytest.MonkeyPatch):
    """A restarted domain stood still for five seconds, until the list of streams was complete."""
    go = asyncio.Event()

    class SilentBus:
        async def budgets(self) -> list[api.StreamBudget]:
            await go.wait()
            raise errors.TimedOut("not all streams replied")

        async def statistics(self) -> None:
            raise errors.Unavailable("the disk is full")

        async def publish(self, *_: object) -> None:
            pass

    disk = retention.BudgetUsage("disk", 100, 100, refuses=True)
    monkeypatch.setattr(retention, "_of_files", lambda *_: [disk])
    supervisor, bus = tasks.TaskSupervisor("budgets"), SilentBus()
    context: Any = types.SimpleNamespace(
        metrics=metrics.Metrics(),
        tasks=supervisor,
        bus=bus,
        store=bus,
        log=log.EventLog("app"),
        folder=None,
        settings=domain_settings.BaseSettings(),
    )
    monitor = retention.RetentionMonitor()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await monitor.start(context)
    assert loop.time() - began_s == pytest.approx(retention.FIRST_CHECK_S)
    go.set()
    monitor = retention.RetentionMonitor()
    began_s = loop.time()
    await monitor.start(context)
    assert loop.time() - began_s < 0.1, "an error is reported, and the check repeated later"
    report = monitor.health()
    assert [row["used_ratio"] for row in report.facts["budgets"]] == [1.0], "what can be measured is"
    assert "streams could not be measured: not all streams replied" in report.reason
    assert "nearly full: disk (critical)" in report.reason
    await supervisor.close()
