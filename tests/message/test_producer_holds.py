"""Reports of slow consumers hold producers of a topic back, for a limited time."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from muster.bus.memory import network
from muster.core import errors
from muster.core.telemetry import metrics
from muster.message import destinations, producer_holds, protocol
from muster.message.client import api
from muster.message.dispatcher import leadership
from muster.testing import eventually
from tests.message import test_hostile_requests

STEP_S = 0.05
NEWS = destinations.topic("news")


def held_share(total_s: float, *, recovers_s: float | None = None, topics: int = 1) -> tuple[float, float]:
    """The longest hold and the share of the time that a client can hold producers which reports in each step,
    with `recovered` in between every ``recovers_s``.
    """
    budgets = producer_holds.HoldBudgets()
    until_s: dict[str, float] = {}
    held_s = longest_s = current_s = 0.0
    recovers_at_s = recovers_s or float("inf")
    names = itertools.cycle(f"t{number}" for number in range(topics))
    for step in range(int(total_s / STEP_S)):
        now_s = step * STEP_S
        topic = next(names)
        if now_s >= recovers_at_s:
            recovers_at_s += recovers_s or 0.0
            if budgets.report("mallory", topic, now_s, recovered=True) is BROADCAST:
                until_s.pop(topic, None)
        if budgets.report("mallory", topic, now_s) is BROADCAST:
            until_s[topic] = now_s + producer_holds.HOLD_S
        if max(until_s.values(), default=0.0) > now_s:
            held_s += STEP_S
            current_s += STEP_S
            longest_s = max(longest_s, current_s)
        else:
            current_s = 0.0
    return longest_s, held_s / total_s


BROADCAST = producer_holds.HoldDecision.BROADCAST
REFUSED = producer_holds.HoldDecision.REFUSED


def test_broadcasts_about_a_consumer_that_recovers_again_and_again_are_limited():
    """Every client receives a broadcast."""
    budgets = producer_holds.HoldBudgets()
    decisions = [
        budgets.report("mallory", "t", step / 10_000, recovered=recovered)
        for step in range(10_000)
        for recovered in (False, True)
    ]
    assert decisions.count(BROADCAST) <= 2 * producer_holds.RECOVERIES_A_SECOND + 10
    assert budgets.report("mallory", "t", 1.0, recovered=True) is BROADCAST


def test_a_consumer_that_recovers_does_not_end_the_hold_of_another_identity():
    budgets = producer_holds.HoldBudgets()
    for at_s in (0.0, 0.01, 0.02):
        budgets.report("ann", "t", 0.0)
        assert budgets.report("mallory", "t", at_s) is BROADCAST
        assert budgets.report("mallory", "t", at_s, recovered=True) is not BROADCAST
    assert budgets.report("ann", "t", 0.1, recovered=True) is BROADCAST
    budgets.report("ann", "t", 1.0)
    budgets.report("mallory", "t", 2.0)
    assert budgets.report("mallory", "t", 2.0, recovered=True) is BROADCAST, "the hold of ann is over"


@pytest.mark.parametrize("recovers_s", [None, 0.05, 0.3, 1.0, 9.0])
@pytest.mark.parametrize("topics", [1, 7])
def test_the_reports_of_an_identity_hold_producers_for_a_limited_time(recovers_s: float | None, topics: int):
    longest_s, share = held_share(600.0, recovers_s=recovers_s, topics=topics)
    assert longest_s <= producer_holds.PATIENCE_S + producer_holds.HOLD_S + STEP_S
    assert share <= producer_holds.SHARE_MAX + 0.01


def test_a_consumer_that_is_slow_half_of_the_time_is_always_waited_for():
    budgets = producer_holds.HoldBudgets()
    for second in range(600):
        for renewal in range(3):
            now_s = second + renewal * producer_holds.RENEW_S
            assert budgets.report("ann", "news", now_s) is BROADCAST
        assert budgets.report("ann", "news", second + 0.5, recovered=True) is BROADCAST


def test_identities_have_budgets_of_their_own():
    budgets = producer_holds.HoldBudgets()
    now_s = 0.0
    while budgets.report("mallory", "news", now_s) is not REFUSED:
        now_s += producer_holds.RENEW_S
    assert budgets.report("ann", "news", now_s) is BROADCAST


def test_a_report_is_broadcast_only_if_it_changes_something():
    budgets = producer_holds.HoldBudgets()
    assert budgets.report("ann", "news", 0.0, recovered=True) is producer_holds.HoldDecision.UNCHANGED
    decisions = [budgets.report("ann", "news", number / 10_000) for number in range(900)]
    assert decisions.count(BROADCAST) == 1
    assert budgets.report("ann", "news", 0.2) is BROADCAST, "a renewal"


def test_the_number_of_topics_that_an_identity_holds_is_limited():
    budgets = producer_holds.HoldBudgets()
    decisions = [budgets.report("mallory", f"t{number}", 0.0) for number in range(1000)]
    assert decisions.count(BROADCAST) == producer_holds.TOPICS_MAX
    assert decisions.count(REFUSED) == 1000 - producer_holds.TOPICS_MAX


@pytest.mark.virtual_time
async def test_a_raw_client_cannot_hold_producers_without_end(simulated_network: network.SimulatedNetwork):
    net, measure = simulated_network, metrics.Metrics()
    started = leadership.DispatcherLeadership(await net.connect("dispatcher"), measure=measure)
    running = asyncio.create_task(started.run())
    await started.acting.wait()
    mallory_bus = await net.connect("mallory")
    async with test_hostile_requests.hostile(net) as mallory, api.Connection(await net.connect("ann")) as ann:
        producer = ann.session().producer(NEWS, persistent=False)
        await producer.send("first")

        async def complain() -> None:
            for recovered in itertools.cycle((False, False, False, True)):
                report = protocol.SlowConsumer(mallory.name, NEWS.name, recovered)
                await mallory_bus.publish(protocol.notify_subject("mallory"), protocol.encode(report))
                await asyncio.sleep(0 if recovered else 0.1)

        complaining = asyncio.create_task(complain())
        await eventually.eventually(lambda: ann.holds.is_held(NEWS))
        async with asyncio.timeout(producer_holds.PATIENCE_S + 5):
            for number in range(3):
                await producer.send(f"{number}")
        value = measure.value
        await eventually.eventually(
            lambda: value("muster_message_slow_consumer_reports_total", outcome="refused")
        )
        held_s = value("muster_message_producer_hold_seconds_total", identity="mallory")
        assert producer_holds.PATIENCE_S - 1 < held_s < producer_holds.PATIENCE_S + 5
        complaining.cancel()
    running.cancel()
    await asyncio.gather(running, complaining, return_exceptions=True)


@pytest.mark.virtual_time
async def test_slow_consumers_are_reported_to_the_first_partition_only(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with test_hostile_requests.serving(net, count=2), test_hostile_requests.hostile(net, 1) as mallory:
        with pytest.raises(errors.InvalidInput, match="first partition"):
            await mallory.request(protocol.SlowConsumer(mallory.name, NEWS.name))
