"""The alert tracker: state table, idempotence, silences, and state after a restart."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors, messages
from muster.core.messages import AlertState
from muster.pipeline.alerts import rules, tracker

HOT = rules.AlertRule(name="hot", scope="node", when="cpu_percent > 90", for_s=30.0, notify=("team",))
DOWN = rules.AlertRule(name="down", scope="group", when="reports = 0")


def book(memory: tracker.AlertTrackerState | None = None) -> tracker.AlertTracker:
    return tracker.AlertTracker((HOT, DOWN), memory)


def say(on: bool, at_s: float, about: str = "node:a", rule: str = "hot") -> list[tracker.RuleVerdict]:
    return [tracker.RuleVerdict(rule, about, on, int(at_s * 1000), 95.0 if on else 10.0, "web")]


def states(outcome: tracker.AlertUpdates) -> list[str]:
    return [alert.state.value for alert in outcome.alerts]


def restarted(alert_tracker: tracker.AlertTracker) -> tracker.AlertTracker:
    return book(
        msgspec.json.decode(msgspec.json.encode(alert_tracker.state()), type=tracker.AlertTrackerState)
    )


def test_an_alert_fires_after_its_duration_and_is_notified_twice():
    alert_tracker = book()
    assert states(alert_tracker.apply(say(True, 0), 0)) == ["pending"]
    assert states(alert_tracker.tick(29_999)) == []
    fired = restarted(alert_tracker).tick(30_000)
    assert states(fired) == ["firing"]
    assert fired.notifications[0].contacts == ("team",)
    alert_tracker.tick(30_000)
    ended = alert_tracker.apply(say(False, 50), 50_000)
    assert states(ended) == ["resolved"]
    assert len(ended.notifications) == 1
    assert alert_tracker.alerts() == []


def test_an_alert_that_ends_while_pending_is_not_notified():
    alert_tracker = book()
    alert_tracker.apply(say(True, 0), 0)
    outcome = alert_tracker.apply(say(False, 10), 10_000)
    assert states(outcome) == ["resolved"]
    assert outcome.notifications == []


def test_a_judgement_made_twice_changes_nothing_the_second_time():
    alert_tracker = book()
    first = alert_tracker.apply(say(True, 0) + say(True, 0, "group:web", "down"), 0)
    assert states(first) == ["pending", "firing"]
    assert states(alert_tracker.apply(say(True, 0) + say(True, 0, "group:web", "down"), 0)) == []
    alert_tracker.apply(say(False, 5, "group:web", "down"), 5000)
    assert states(alert_tracker.apply(say(True, 0, "group:web", "down"), 5000)) == []


def test_a_window_without_a_figure_leaves_the_last_one_known():
    alert_tracker = book()
    alert_tracker.apply(say(True, 0), 0)
    unknown = tracker.RuleVerdict("hot", "node:a", True, 10_000, None, "web")
    alert_tracker.apply([unknown], 10_000)
    fired = alert_tracker.tick(30_000)
    assert states(fired) == ["firing"]
    assert fired.alerts[0].value == 95.0


def test_acknowledged_stays_so_until_it_ends():
    alert_tracker = book()
    alert_tracker.apply(say(True, 0, "group:web", "down"), 0)
    acknowledged = alert_tracker.acknowledge("down", "group:web", "ann", 1000)
    assert acknowledged.alerts[0].acknowledged_by == "ann"
    alert_tracker = restarted(alert_tracker)
    assert alert_tracker.alerts()[0].state is AlertState.ACKNOWLEDGED
    with pytest.raises(errors.Conflict):
        alert_tracker.acknowledge("down", "group:web", "bob", 2000)
    assert states(alert_tracker.apply(say(False, 3, "group:web", "down"), 3000)) == ["resolved"]
    with pytest.raises(errors.NotFound):
        alert_tracker.acknowledge("down", "group:web", "bob", 4000)


def test_a_resolved_alert_is_raised_again_only_if_its_rule_is_true_again():
    known = book()
    known.apply(say(True, 0, "group:web", "down"), 0)
    resolved = known.resolve("down", "group:web", 1000)
    assert [alert.state for alert in resolved.alerts] == [AlertState.RESOLVED]
    assert known.alerts() == []
    assert known.on() == frozenset()
    with pytest.raises(errors.NotFound, match="no open alert"):
        known.resolve("down", "group:web", 2000)
    with pytest.raises(errors.NotFound):
        known.resolve("down", "group:db", 2000)
    known = restarted(known)
    assert states(known.apply(say(True, 3, "group:web", "down"), 3000)) == ["firing"]


def test_a_silence_covers_what_it_selects_while_it_lasts_and_then_it_fires():
    alert_tracker = book()
    silence = tracker.Silence(id="s", covers="group = 'web' AND rule = 'hot'", from_ms=0, until_ms=60_000)
    alert_tracker.silence(silence, 0)
    alert_tracker.apply(say(True, 0), 0)
    assert states(alert_tracker.tick(30_000)) == ["silenced"]
    spoken = restarted(alert_tracker).tick(60_000)
    assert states(spoken) == ["firing"]
    assert len(spoken.notifications) == 1
    assert alert_tracker.unsilence("s").alerts[0].state is AlertState.FIRING


def test_a_maintenance_window_begins_later():
    alert_tracker = book()
    alert_tracker.silence(tracker.Silence(id="m", covers="TRUE", from_ms=10_000, until_ms=20_000), 0)
    assert states(alert_tracker.apply(say(True, 1, "group:web", "down"), 1000)) == ["firing"]
    assert states(alert_tracker.tick(10_000)) == ["silenced"]
    assert states(alert_tracker.tick(20_000)) == ["firing"]
    assert alert_tracker.silences() == []


@pytest.mark.parametrize(
    ("covers", "from_ms", "until_ms", "fault"),
    [
        ("colour = 'red'", 0, 10, "colour"),
        ("rule =", 0, 10, "end"),
        ("TRUE", 0, 0, "before it begins"),
        ("TRUE", -1, 10, "begin at -1 ms"),
        ("TRUE", 0, 10**17, "end at"),
    ],
)
def test_a_silence_that_makes_no_sense_is_refused(covers, from_ms, until_ms, fault):
    alert_tracker = book()
    with pytest.raises(errors.InvalidInput, match=fault):
        alert_tracker.silence(tracker.Silence(id="x", covers=covers, from_ms=from_ms, until_ms=until_ms), 0)
    assert restarted(alert_tracker).silences() == []


def test_a_silence_by_an_operator_whose_clock_is_ahead_moves_no_alert_on():
    alert_tracker = book()
    alert_tracker.apply(say(True, 10), 10_000)
    hour_ms = 3_600_000
    other = tracker.Silence(id="s", covers="rule = 'other'", from_ms=hour_ms, until_ms=2 * hour_ms)
    assert states(alert_tracker.silence(other, hour_ms)) == []
    assert states(alert_tracker.tick(39_999)) == []
    assert states(alert_tracker.tick(40_000)) == ["firing"]


def test_an_alert_about_a_group_ends_when_nothing_was_reported_of_it_for_long():
    alert_tracker = tracker.AlertTracker((DOWN,), forget_s=3600.0)
    alert_tracker.apply(say(True, 0, "group:web", "down"), 0)
    assert states(alert_tracker.tick(3_600_000)) == []
    assert states(alert_tracker.tick(3_600_001)) == ["resolved"]
    assert alert_tracker.on() == frozenset()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("judge"), st.booleans()),
            st.tuples(st.just("acknowledge"), st.none()),
            st.tuples(st.just("silence"), st.integers(1, 40)),
            st.tuples(st.just("restart"), st.none()),
            st.tuples(st.just("wait"), st.integers(1, 40)),
        ),
        max_size=40,
    )
)
def test_random_events_follow_the_table_and_no_end_is_notified_without_a_beginning(steps):
    first, now_s, reported = book(), 0, False
    before = AlertState.RESOLVED
    for what, how in steps:
        now_s += 1
        match what:
            case "judge":
                outcome = first.apply(say(how, now_s), now_s * 1000)
            case "acknowledge":
                try:
                    outcome = first.acknowledge("hot", "node:a", "ann", now_s * 1000)
                except (errors.NotFound, errors.Conflict):
                    continue
            case "silence":
                wish = tracker.Silence(
                    id=str(now_s), covers="TRUE", from_ms=now_s * 1000, until_ms=(now_s + how) * 1000
                )
                outcome = first.silence(wish, now_s * 1000)
            case "restart":
                first = restarted(first)
                continue
            case _:
                now_s += how
                outcome = first.tick(now_s * 1000)
        for alert in outcome.alerts:
            reachable = {after for (state, _), after in tracker.NEXT.items() if state is before}
            # A silence that covers it already is applied in the same step as what makes it fire.
            assert alert.state in reachable or (
                alert.state is AlertState.SILENCED and AlertState.FIRING in reachable
            )
            before = alert.state
        for notice in outcome.notifications:
            if notice.alert.state is AlertState.RESOLVED:
                assert reported
            reported = notice.alert.state is AlertState.FIRING


def test_a_page_of_alerts_has_the_first_open_ones_after_a_key(monkeypatch):
    alert_tracker = book()
    names = [f"node:m{number:03}" for number in range(50)]
    alert_tracker.apply([tracker.RuleVerdict(HOT.name, name, True, 1_000) for name in reversed(names)], 1_000)
    alert_tracker.apply([tracker.RuleVerdict(HOT.name, names[3], False, 2_000)], 2_000)
    made: list[str] = []
    plain = tracker.AlertTracker._alert

    def counted(self: tracker.AlertTracker, entry: tracker.TrackedAlert) -> messages.Alert:
        made.append(entry.about)
        return plain(self, entry)

    monkeypatch.setattr(tracker.AlertTracker, "_alert", counted)
    page = alert_tracker.page("", 4)
    assert [alert.about for alert in page] == made == [names[0], names[1], names[2], names[4]]
    assert [alert.about for alert in alert_tracker.page(tracker.alert_key(page[-1]), 100)] == names[5:]
