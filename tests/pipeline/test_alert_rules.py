"""The states of an alert, rule by rule, each at its boundary."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from muster.core import errors, messages
from muster.core.messages import AlertState
from muster.pipeline.alerts import rules, tracker, webhooks

HOT = rules.AlertRule(name="hot", scope="node", when="cpu_percent > 90", for_s=30.0, notify=("team",))
DOWN = rules.AlertRule(
    name="down",
    scope="group",
    when="reports = 0",
    notify=("team", "boss"),
    labels={"team": "web"},
    severity=messages.Severity.CRITICAL,
)
QUIET = rules.AlertRule(name="quiet", scope="system", when="reports = 0")
ZONE = rules.AlertRule(name="dark", scope="zone", when="reports = 0")
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def make_book(memory: tracker.AlertTrackerState | None = None, **more: Any) -> tracker.AlertTracker:
    return tracker.AlertTracker((HOT, DOWN, QUIET, ZONE), memory, **more)


def say(rule: str, about: str, on: bool, at_ms: int, value: float | None = 1.0) -> tracker.RuleVerdict:
    return tracker.RuleVerdict(rule, about, on, at_ms, value, "web" if rule == "hot" else "")


def states(outcome: tracker.AlertUpdates) -> list[str]:
    return [alert.state.value for alert in outcome.alerts]


def notices(outcome: tracker.AlertUpdates) -> list[tuple[str, tuple[str, ...]]]:
    return [(notice.alert.state.value, notice.contacts) for notice in outcome.notifications]


def silence(id: str = "s", covers: str = "TRUE", from_ms: int = 0, until_ms: int = 100) -> tracker.Silence:
    return tracker.Silence(id=id, covers=covers, from_ms=from_ms, until_ms=until_ms)


# What is listed.


def test_alerts_that_fire_are_listed_first_and_of_each_state_the_oldest():
    book = make_book()
    book.apply([say("hot", "node:later", True, 20), say("hot", "node:b", True, 10)], 20)
    book.apply([say("hot", "node:a", True, 10)], 20)
    book.apply([say("down", f"group:{name}", True, 5) for name in "xyz"], 20)
    book.acknowledge("down", "group:x", "ann", 30)
    book.silence(silence(covers="about = 'group:y'", until_ms=1000), 20)
    book.apply([say("quiet", "system", True, 15)], 20)
    assert [(alert.state.value, alert.about) for alert in book.alerts()] == [
        ("firing", "group:z"),
        ("firing", "system"),
        ("pending", "node:a"),
        ("pending", "node:b"),
        ("pending", "node:later"),
        ("acknowledged", "group:x"),
        ("silenced", "group:y"),
    ]
    assert tracker.alert_key(book.alerts()[0]) == "down group:z"


def test_an_alert_about_a_machine_with_the_longest_name_can_be_read():
    book = make_book()
    book.apply([say("hot", f"node:{'x' * 256}", True, 0)], 30_000)
    (alert,) = book.alerts()
    assert messages.decode(messages.encode(alert), messages.Alert) == alert


def test_an_alert_contains_its_known_details():
    book = make_book()
    judged = book.apply([tracker.RuleVerdict("down", "group:x", True, 5, 7.0, "x")], 9)
    (alert,) = judged.alerts
    assert (alert.rule, alert.about, alert.severity) == ("down", "group:x", messages.Severity.CRITICAL)
    assert (alert.state, alert.since_ms, alert.at_ms) == (AlertState.FIRING, 5, 5)
    assert (alert.value, alert.labels) == (7.0, {"team": "web", "group": "x"})
    assert alert.reason == "down holds of group:x"
    assert judged.notifications[0].id == "down:group:x:firing:5"
    book.apply([tracker.RuleVerdict("down", "group:x", True, 8, 6.0, "")], 9)
    (alert,) = book.alerts()
    assert (alert.since_ms, alert.at_ms, alert.value) == (5, 8, 6.0)
    assert alert.labels == {"team": "web", "group": "x"}, "frozen when it fired"
    (alert,) = book.acknowledge("down", "group:x", "ann", 100).alerts
    assert (alert.since_ms, alert.at_ms) == (100, 100)
    assert (alert.labels, alert.acknowledged_by) == ({"team": "web", "group": "x"}, "ann")


def test_silences_are_listed_by_their_end():
    book = make_book()
    for id, until_ms in (("a", 30), ("b", 10), ("c", 20)):
        book.silence(silence(id, until_ms=until_ms), 0)
    assert [each.id for each in book.silences()] == ["b", "c", "a"]


def test_values_cannot_be_changed():
    values = (
        say("hot", "a", True, 1),
        silence(),
        tracker.AlertNotification(
            messages.Alert(
                rule="r",
                about="a",
                severity=messages.Severity.INFO,
                state=AlertState.FIRING,
                at_ms=1,
                since_ms=1,
            ),
            (),
        ),
    )
    for value in values:
        with pytest.raises(AttributeError):
            setattr(value, value.__struct_fields__[0], "x")
    with pytest.raises(TypeError):
        tracker.Silence("s", "TRUE", 0, 1)  # type: ignore[call-arg]


# Judgements.


def test_a_rule_that_is_not_known_is_not_judged_and_does_not_stop_others():
    book = make_book()
    outcome = book.apply([say("gone", "node:a", True, 0), say("quiet", "system", True, 0)], 0)
    assert [alert.rule for alert in outcome.alerts] == ["quiet"]


def test_what_never_began_does_not_end_and_does_not_stop_others():
    book = make_book()
    outcome = book.apply([say("hot", "node:a", False, 0), say("quiet", "system", True, 0)], 0)
    assert [alert.rule for alert in outcome.alerts] == ["quiet"]
    assert [entry.rule for entry in book.state().entries] == ["quiet"]


def test_an_older_judgement_changes_nothing_and_one_of_the_same_time_counts():
    book = make_book()
    book.apply([say("quiet", "system", True, 100, 5.0)], 100)
    outcome = book.apply([say("quiet", "system", False, 99, 1.0), say("down", "group:x", True, 1)], 100)
    assert [alert.rule for alert in outcome.alerts] == ["down"]
    assert book.alerts()[0].value in (5.0, 1.0)
    assert {(alert.rule, alert.value) for alert in book.alerts()} == {("quiet", 5.0), ("down", 1.0)}
    assert states(book.apply([say("quiet", "system", False, 100)], 100)) == ["resolved"]


def test_a_condition_that_stays_true_begins_no_second_alert():
    book = make_book()
    book.apply([say("hot", "node:a", True, 5_000)], 5_000)
    assert states(book.apply([say("hot", "node:a", True, 20_000)], 20_000)) == []
    assert states(book.tick(34_999)) == []
    (fired,) = book.apply([], 36_000).alerts
    assert (fired.state, fired.since_ms) == (AlertState.FIRING, 35_000)


def test_which_rules_are_true_of_what_is_known_whatever_their_alerts_do():
    book = make_book()
    book.apply([say("hot", "node:a", True, 0), say("quiet", "system", True, 0)], 0)
    assert book.on() == {("hot", "node:a"), ("quiet", "system")}
    book.apply([say("quiet", "system", False, 1)], 1)
    assert book.on() == {("hot", "node:a")}


# Notices.


def test_contacts_are_notified_when_an_alert_fires_and_when_it_ends():
    book = make_book()
    assert notices(book.apply([say("down", "group:x", True, 0)], 0)) == [("firing", ("team", "boss"))]
    assert notices(book.acknowledge("down", "group:x", "ann", 1)) == []
    assert notices(book.apply([say("down", "group:x", False, 2)], 2)) == [("resolved", ("team", "boss"))]


def test_a_rule_without_receivers_notifies_no_receiver():
    book = make_book()
    assert notices(book.apply([say("quiet", "system", True, 0)], 0)) == []
    assert notices(book.apply([say("quiet", "system", False, 1)], 1)) == []


def test_the_end_of_an_alert_that_was_not_reported_is_not_reported_whatever_happened_before():
    book = make_book()
    book.apply([say("hot", "node:a", True, 0)], 0)
    assert notices(book.tick(30_000)) == [("firing", ("team",))]
    assert notices(book.apply([say("hot", "node:a", False, 30_001)], 30_001)) == [("resolved", ("team",))]
    book.apply([say("hot", "node:a", True, 30_002)], 30_002)
    assert notices(book.apply([say("hot", "node:a", False, 30_003)], 30_003)) == []


def test_an_alert_that_was_silenced_from_its_beginning_ends_without_a_notice():
    book = make_book()
    book.silence(silence(until_ms=50), 0)
    assert states(book.apply([say("down", "group:x", True, 0)], 0)) == ["silenced"]
    ended = book.apply([say("down", "group:x", False, 10)], 10)
    assert (states(ended), notices(ended)) == (["resolved"], [])


def test_an_alert_that_was_silenced_after_its_notice_ends_with_a_notice():
    book = make_book()
    book.apply([say("down", "group:x", True, 0)], 0)
    assert states(book.silence(silence(until_ms=50), 0)) == ["silenced"]
    assert notices(book.apply([say("down", "group:x", False, 10)], 10)) == [("resolved", ("team", "boss"))]


# Acknowledging.


def test_only_what_fires_or_is_silenced_can_be_acknowledged():
    book = make_book()
    with pytest.raises(errors.NotFound):
        book.acknowledge("hot", "node:a", "ann", 0)
    book.apply([say("hot", "node:a", True, 0)], 0)
    with pytest.raises(errors.Conflict, match="is pending"):
        book.acknowledge("hot", "node:a", "ann", 0)
    assert not book.alerts()[0].acknowledged_by
    book.silence(silence(until_ms=HOUR_MS), 0)
    book.tick(30_000)
    (alert,) = book.acknowledge("hot", "node:a", "ann", 30_001).alerts
    assert alert.state is AlertState.ACKNOWLEDGED
    assert states(book.tick(HOUR_MS)) == [], "the end of the silence is nothing to it"
    book.apply([say("hot", "node:a", False, HOUR_MS)], HOUR_MS)
    with pytest.raises(errors.NotFound):
        book.acknowledge("hot", "node:a", "ann", HOUR_MS)
    book.apply([say("hot", "node:a", True, HOUR_MS + 1)], HOUR_MS + 1)
    assert not book.alerts()[0].acknowledged_by, "it is another alert"


# Silences.


@pytest.mark.parametrize(
    ("from_ms", "until_ms", "now_ms", "good"),
    [
        (5, 6, 0, True),
        (5, 5, 0, False),
        (0, 11, 10, True),
        (0, 10, 10, False),
        (0, messages.TIME_MS_MAX, 0, True),
        (0, messages.TIME_MS_MAX + 1, 0, False),
        (-1, 10, 0, False),
    ],
)
def test_a_silence_has_to_end_after_its_beginning_and_after_now(from_ms, until_ms, now_ms, good):
    book = make_book()
    wish = silence(from_ms=from_ms, until_ms=until_ms)
    if good:
        book.silence(wish, now_ms)
    else:
        with pytest.raises(errors.InvalidInput):
            book.silence(wish, now_ms)
    assert len(book.silences()) == good


def test_there_are_at_most_ten_thousand_silences():
    kept = [silence(str(number), until_ms=10**9) for number in range(9_999)]
    book = make_book(tracker.AlertTrackerState(silences=kept))
    book.silence(silence("last", until_ms=10**9), 0)
    with pytest.raises(errors.LimitExceeded, match="10000 silences"):
        book.silence(silence("extra", until_ms=10**9), 0)
    assert len(book.silences()) == 10_000


@pytest.mark.parametrize(
    ("covers", "state"),
    [
        ("rule = 'down'", "silenced"),
        ("rule = 'hot'", "firing"),
        ("about = 'group:x'", "silenced"),
        ("scope = 'group'", "silenced"),
        ("scope = 'zone'", "firing"),
        ("severity = 'critical'", "silenced"),
        ("severity = 'warning'", "firing"),
        ("group = 'x'", "silenced"),
        ("group = 'y'", "firing"),
    ],
)
def test_a_silence_selects_by_all_that_an_alert_is(covers, state):
    book = make_book()
    book.silence(silence("other", "rule = 'none'"), 0)
    book.silence(silence("s", covers), 0)
    assert states(book.apply([tracker.RuleVerdict("down", "group:x", True, 1, None, "x")], 1)) == [state]


@pytest.mark.parametrize(
    ("covers", "hint"),
    [
        ("level = 'critical'", "did you mean severity"),
        ("group = 'x' AND level IN ('node', 'group')", "did you mean severity"),
        ("scope = 'critical'", "did you mean severity"),
        ("NOT severity IN ('critical', 'zone')", "did you mean scope"),
        ("severity = 'fatal'", None),
    ],
)
def test_a_silence_that_can_never_match_is_rejected(covers, hint):
    book = make_book()
    with pytest.raises(errors.InvalidInput) as raised:
        book.silence(silence("s", covers), 0)
    assert hint is None if raised.value.hint is None else raised.value.hint.startswith(hint)
    assert book.silences() == []


def test_a_silence_covers_from_its_beginning_until_its_end():
    book = make_book()
    book.apply([say("down", "group:x", True, 0)], 0)
    assert states(book.silence(silence(from_ms=10, until_ms=20), 0)) == []
    steps = [(now_ms, states(book.tick(now_ms)), len(book.silences())) for now_ms in (9, 10, 19, 20, 21)]
    assert steps == [(9, [], 1), (10, ["silenced"], 1), (19, [], 1), (20, ["firing"], 0), (21, [], 0)]
    assert book._covers == {}, "nothing remains of a silence that is over"


def test_an_alert_that_two_silences_cover_is_silent_until_both_are_over():
    book = make_book()
    book.apply([say("down", "group:x", True, 0)], 0)
    book.silence(silence("a", until_ms=10), 0)
    book.silence(silence("b", until_ms=20), 0)
    assert states(book.tick(10)) == []
    assert states(book.tick(20)) == ["firing"]


@pytest.mark.parametrize("how", ["ended early", "over", "replaced"])
def test_a_silence_of_the_same_name_covers_what_the_new_silence_selects(how):
    book = make_book()
    book.silence(silence("s", "rule = 'down'", until_ms=10), 0)
    assert states(book.apply([say("down", "group:x", True, 1)], 1)) == ["silenced"]
    if how == "ended early":
        assert states(book.unsilence("s")) == ["firing"]
    elif how == "over":
        assert states(book.tick(10)) == ["firing"]
    outcome = book.silence(silence("s", "rule = 'quiet'", until_ms=100), 10)
    assert states(outcome) == (["firing"] if how == "replaced" else [])
    assert states(book.apply([say("quiet", "system", True, 11)], 11)) == ["silenced"]


def test_only_a_silence_that_is_there_can_be_ended():
    book = make_book()
    with pytest.raises(errors.NotFound, match="'s'"):
        book.unsilence("s")
    book.silence(silence(), 0)
    book.apply([say("down", "group:x", True, 0)], 0)
    book.unsilence("s")
    assert book.silences() == []
    assert book._covers == {}


@pytest.mark.parametrize("covers", ["colour = 'red'", "rule ="])
def test_a_silence_that_selects_by_something_unknown_is_refused(covers):
    book = make_book()
    with pytest.raises(errors.InvalidInput):
        book.silence(silence(covers=covers), 0)
    assert book.silences() == []


# Time.


def test_time_never_goes_back():
    book = make_book()
    book.tick(1000)
    assert book.tick(500).alerts == []
    assert book.state().now_ms == 1000
    book.silence(silence(from_ms=0, until_ms=2000), 0)
    assert states(book.apply([say("down", "group:x", True, 1)], 600)) == ["silenced"]
    assert book.state().now_ms == 1000


def test_a_new_book_begins_at_time_0():
    assert make_book().state() == tracker.AlertTrackerState(version=1, now_ms=0, entries=[], silences=[])


@pytest.mark.parametrize("after_ms", [HOUR_MS, HOUR_MS + 1])
def test_a_resolved_alert_is_remembered_for_an_hour(after_ms):
    book = make_book()
    book.apply([say("quiet", "system", True, 1000)], 1000)
    book.apply([say("quiet", "system", False, 1000)], 1000)
    book.tick(1000 + after_ms)
    assert len(book.state().entries) == (after_ms <= HOUR_MS)


@pytest.mark.parametrize(
    ("rule", "about", "ends"),
    [
        ("down", "group:x", True),
        ("dark", "zone:z", True),
        ("quiet", "system", False),
        ("hot", "node:a", False),
    ],
)
def test_an_alert_about_a_group_or_zone_without_reports_for_a_day_ends(rule, about, ends):
    book = make_book()
    book.apply([say(rule, about, True, 1000)], 1000)
    book.tick(HOUR_MS)
    assert states(book.tick(1000 + DAY_MS)) == []
    assert states(book.tick(1000 + DAY_MS + 1)) == (["resolved"] if ends else [])
    assert ((rule, about) in book.on()) is not ends


def test_of_a_rule_that_is_gone_nothing_is_remembered_and_the_rest_is():
    book = make_book()
    book.apply([say("hot", "node:a", True, 0), say("quiet", "system", True, 0)], 0)
    book.silence(silence(until_ms=50), 0)
    memory = msgspec.json.decode(msgspec.json.encode(book.state()), type=tracker.AlertTrackerState)
    later = tracker.AlertTracker((HOT,), memory)
    assert [alert.rule for alert in later.alerts()] == ["hot"]
    assert later.silences() == book.silences()


EDITED = msgspec.structs.replace(
    DOWN, notify=("other",), labels={"team": "db"}, severity=messages.Severity.INFO
)


@pytest.mark.parametrize("acknowledged", [False, True])
@pytest.mark.parametrize("group", ["x", "moved", ""])
@pytest.mark.parametrize(
    "known",
    [
        (DOWN,),
        (EDITED,),
        (msgspec.structs.replace(DOWN, notify=()),),
        (msgspec.structs.replace(DOWN, scope="zone"),),
        (msgspec.structs.replace(DOWN, only=("other",)),),
        (),
    ],
    ids=["same", "edited", "no-contact", "other-scope", "not-in-only", "removed"],
)
def test_the_end_of_an_alert_has_the_identity_and_the_contacts_of_its_beginning(
    known: tuple[rules.AlertRule, ...], group: str, acknowledged: bool
):
    book = make_book()
    (fired,) = book.apply([tracker.RuleVerdict("down", "group:x", True, 5, 7.0, "x")], 9).notifications
    if acknowledged:
        book.acknowledge("down", "group:x", "ann", 10)
    restored = msgspec.json.decode(msgspec.json.encode(book.state()), type=tracker.AlertTrackerState)
    later = tracker.AlertTracker(known, restored)
    (ended,) = later.apply([tracker.RuleVerdict("down", "group:x", False, 20, 0.0, group)], 20).notifications
    assert ended.alert.state is AlertState.RESOLVED
    assert ended.contacts == fired.contacts
    bodies = [
        msgspec.json.decode(webhooks.body("alertmanager-api", None, "team", sent, str))
        for sent in (fired, ended)
    ]
    assert bodies[0][0]["labels"] == bodies[1][0]["labels"]
    assert not later.alerts()


def test_a_firing_alert_keeps_its_identity_and_the_next_one_has_that_of_the_rule():
    book = make_book()
    book.apply([tracker.RuleVerdict("down", "group:x", True, 5, 7.0, "x")], 9)
    later = tracker.AlertTracker((EDITED,), book.state())
    (alert,) = later.alerts()
    assert (alert.severity, alert.labels) == (DOWN.severity, {"team": "web", "group": "x"})
    assert states(
        later.silence(silence(covers="severity = 'critical' AND group = 'x'", until_ms=50), 10)
    ) == ["silenced"]
    assert notices(later.tick(60)) == [("firing", DOWN.notify)]
    later.apply([say("down", "group:x", False, 100)], 100)
    (again,) = later.apply([tracker.RuleVerdict("down", "group:x", True, 200, 7.0, "y")], 300).notifications
    assert again.contacts == EDITED.notify
    assert (again.alert.severity, again.alert.labels) == (EDITED.severity, {"team": "db", "group": "y"})


def test_an_alert_of_a_group_that_its_rule_no_longer_names_ends():
    book = make_book()
    book.apply([say("down", "group:db", True, 5), say("down", "group:web", True, 5)], 9)
    edited = msgspec.structs.replace(DOWN, only=("web",))
    ended = tracker.AlertTracker((edited,), book.state()).tick(20)
    assert [(alert.about, alert.state) for alert in ended.alerts] == [("group:db", AlertState.RESOLVED)]
    assert [notification.contacts for notification in ended.notifications] == [DOWN.notify]


def test_alerts_of_a_rule_that_was_removed_or_has_another_scope_end_once_and_contacts_receive_it():
    book = make_book()
    before = book.apply([say("hot", "node:a", True, 0), say("quiet", "system", True, 0)], 100_000)
    assert {notification.alert.rule for notification in before.notifications} == {"hot"}
    stored = msgspec.json.encode(book.state())
    moved = rules.AlertRule(name="hot", scope="group", when="reports = 0")
    for known in ((), (moved,)):
        later = tracker.AlertTracker(known, msgspec.json.decode(stored, type=tracker.AlertTrackerState))
        # Stored again before it ran: nothing is forgotten.
        kept = msgspec.json.decode(msgspec.json.encode(later.state()), type=tracker.AlertTrackerState)
        assert {entry.rule for entry in kept.entries} == {"hot", "quiet"}
        ended = tracker.AlertTracker(known, kept).tick(200_000)
        assert {(alert.rule, alert.state.value, alert.at_ms) for alert in ended.alerts} == {
            ("hot", "resolved", 200_000),
            ("quiet", "resolved", 200_000),
        }
        assert [(notification.alert.rule, notification.contacts) for notification in ended.notifications] == [
            ("hot", HOT.notify)
        ]
        assert later.tick(200_000).alerts
        assert not later.tick(300_000).alerts
        assert not later.state().entries
