"""The fleet's state and the alerts of its machines and groups, against a naive model.

Random batches of reports with wrong clocks, silences, restarts, repeats and long silences.  Whatever happens,
an open alert is about a machine whose last report is hot; and when nothing was deferred, every such machine
has one.
"""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from muster.core.reports import columns
from muster.pipeline.alerts import rules, tracker
from muster.pipeline.fleet import blocks, node_columns, rollups, state
from tests.pipeline import traffic

T0 = 1_700_000_000_000
WINDOW_MS = 10_000
HOT = rules.AlertRule(name="hot", scope="node", when="cpu_percent > 90")
CROWDED = rules.AlertRule(name="crowded", scope="group", when="machines > 0 OR stale > 0")
PLAN = state.FleetStatePlan(rules=(HOT, CROWDED), changes_max=2, forget_s=120.0)
MACHINES = [f"m{number}" for number in range(6)]
REPORT = st.tuples(st.sampled_from(MACHINES), st.booleans(), st.integers(-45_000, 45_000))


class AlertMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.fleet = state.FleetState(PLAN)
        self.book = tracker.AlertTracker(PLAN.rules, forget_s=PLAN.forget_s)
        self.judge = rollups.ScopeRuleEvaluator(PLAN.rules, rollups.Baselines())
        self.now_ms = T0
        self.message = 0  # its place in the stream
        self.number: dict[str, int] = {}  # of the last report of a machine
        self.hot: dict[str, bool] = {}  # its last report
        self.received_ms: dict[str, int] = {}
        self.deferred = False

    def feed(self, arrivals: list[blocks.ReportPiece]) -> None:
        output = self.fleet.feed(arrivals, self.now_ms)
        verdicts = [
            *rollups.node_verdicts(output.changes),
            *self.judge.evaluate(rollups.scope_totals(output.closed), self.book.on()),
        ]
        verdicts.sort(key=lambda value: value.at_ms)
        self.last = verdicts
        self.book.apply(verdicts, output.clock_ms)
        self.deferred = any(reason.endswith(" hot") for reason in output.counts)
        for machine, received_ms in list(self.received_ms.items()):
            if self.now_ms - received_ms > PLAN.forget_s * 1000 + 2 * WINDOW_MS:
                del self.received_ms[machine], self.hot[machine]

    @rule(
        messages=st.lists(st.lists(REPORT, min_size=1, max_size=6), max_size=3), step_ms=st.integers(0, 9000)
    )
    def batch(self, messages: list[list[tuple[str, bool, int]]], step_ms: int) -> None:
        arrivals = []
        for rows in messages:
            self.now_ms += step_ms
            self.message += 1
            made = []
            for machine, hot, skew_ms in rows:
                number = self.number[machine] = self.number.get(machine, 0) + 1
                at_ms = self.now_ms + max(skew_ms, -5000)
                cpu = 99.0 if hot else 1.0
                made.append(traffic.report(machine, number, at_ms, metrics={"cpu_percent": cpu}))
                self.hot[machine], self.received_ms[machine] = hot, self.now_ms
            arrivals.append(
                blocks.ReportPiece.from_message(
                    self.message, self.now_ms, columns.to_batch(made), columns.BatchInfo()
                )
            )
        self.feed(arrivals)

    @rule(seconds=st.integers(1, 200))
    def nothing_is_reported(self, seconds: int) -> None:
        for _ in range(0, seconds, 10):
            self.now_ms += WINDOW_MS
            self.feed([])

    @rule()
    def a_batch_is_judged_again(self) -> None:
        self.book.apply(getattr(self, "last", []), self.now_ms)

    @rule(ahead_s=st.integers(0, 7200))
    def an_operator_silences_something_else(self, ahead_s: int) -> None:
        at_ms = self.now_ms + ahead_s * 1000
        silence = tracker.Silence(id="s", covers="rule = 'other'", from_ms=at_ms, until_ms=at_ms + 1000)
        self.book.silence(silence, at_ms)

    @rule()
    def the_process_restarts(self) -> None:
        names = self.fleet.nodes.names
        self.fleet = state.FleetState.unpack(
            self.fleet.pack(), PLAN, node_columns.NodeNames.unpack(names.version, names.pack())
        )
        memory = msgspec.json.decode(msgspec.json.encode(self.book.state()), type=tracker.AlertTrackerState)
        self.book = tracker.AlertTracker(PLAN.rules, memory, forget_s=PLAN.forget_s)

    @invariant()
    def alerts_are_about_hot_machines(self) -> None:
        if not hasattr(self, "book"):
            return
        about = {alert.about for alert in self.book.alerts() if alert.rule == "hot"}
        hot = {f"node:{machine}" for machine, is_hot in self.hot.items() if is_hot}
        kept = {
            f"node:{machine}" for machine, at_ms in self.received_ms.items() if self.now_ms - at_ms <= 120_000
        }
        assert about <= hot
        if not self.deferred:
            assert hot & kept <= about | self.never_judged_again(hot)

    def never_judged_again(self, hot: set[str]) -> set[str]:
        """A machine that was deferred is judged at its next report."""
        column = self.fleet.nodes.data["on hot"]
        names = self.fleet.nodes.names.array.to_pylist()
        return {f"node:{name}" for name, on in zip(names, column.tolist(), strict=True) if not on}

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for _ in MACHINES:  # everything cools down, and whatever was deferred is judged
            self.batch([[(machine, False, 0) for machine in MACHINES]], 1000)
        assert not [alert for alert in self.book.alerts() if alert.rule == "hot"]
        self.nothing_is_reported(160)
        assert self.book.alerts() == []


AlertMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestAlerts = AlertMachine.TestCase
