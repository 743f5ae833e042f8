"""Admission: budgets of identities, pending requests, answers to refusals, turns of the event loop."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Callable
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from muster.bus import api
from muster.bus.client import received
from muster.bus.memory import network
from muster.bus.rpc import admission, requests, server
from muster.core import leaky_buckets
from muster.testing.eventually import eventually

STEPS = st.lists(
    st.tuples(
        st.floats(0, 0.5), st.sampled_from("ab"), st.integers(0, 200_000), st.sampled_from([0.0, 1, 20])
    ),
    max_size=200,
)


@settings(max_examples=60)
@given(st.floats(0.001, 1), STEPS)
def test_no_identity_costs_more_than_its_share(share, steps):
    """What is admitted in all is at most one second's budget, what the time forgave, and the last request."""
    core, now_s, spent = admission.Admission(share), 0.0, {"a": 0.0, "b": 0.0}
    per_s = 1000 * share
    burst = max(1, round(per_s))
    for wait_s, identity, size, cost in steps:
        now_s += wait_s
        if core.receive(identity, size, now_s):
            assert spent[identity] <= burst + now_s * per_s + 1e-6
            spent[identity] += admission.RECEIVED + size / admission.RECEIVED_BYTES
            core.charge(identity, cost, now_s)
            spent[identity] += min(cost, burst)  # beyond twice the budget a debt is not remembered
        assert core.wait_s(identity, now_s) or core.receive(identity, 0, now_s)


@given(STEPS)
def test_a_flood_of_one_identity_leaves_the_budget_of_others(steps):
    core, now_s = admission.Admission(0.005), 0.0
    for wait_s, _, size, cost in steps:
        now_s += wait_s
        core.receive("flood", size, now_s)
        core.charge("flood", cost, now_s)
    assert core.receive("quiet", 0, now_s)
    assert core.receive("flood", 0, now_s + 3.0), "a budget is back after two seconds at the latest"


@given(st.lists(st.tuples(st.floats(0, 0.4), st.sampled_from("ab")), max_size=100))
def test_a_refusal_is_answered_at_most_once_a_second(steps):
    core, now_s = admission.Admission(), 0.0
    answered: dict[str, list[float]] = {"a": [], "b": []}
    for wait_s, identity in steps:
        now_s += wait_s
        if core.may_answer(identity, now_s):
            answered[identity].append(now_s)
    for times in answered.values():
        assert all(later - earlier > 0.999 for earlier, later in itertools.pairwise(times))


def test_the_identities_that_are_remembered_are_bounded():
    core = admission.Admission()
    for number in range(leaky_buckets.KEYS_MAX + 100):
        core.receive(str(number), 0, 0.0)
    assert len(core._costs) == leaky_buckets.KEYS_MAX


def has_room(own: list[int], every: list[int], limit: int, size: int) -> bool:
    """The specification: ``own`` and ``every``: the sizes of what is pending, of the identity and of all."""
    most = admission.PENDING_BYTES_MAX
    return (
        len(every) < limit
        and len(own) < (limit + 1) // 2
        and (not own or sum(own) + size <= most // 2)
        and (not every or sum(every) + size <= most)
    )


UNIT = admission.PENDING_BYTES_MAX // 200


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.integers(0, 300)), max_size=100),
)
def test_one_identity_has_at_most_half_of_the_pending_requests(limit, steps):
    pending = admission.PendingRequests(limit)
    sizes: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for begins, identity, units in steps:
        if begins:
            every = list(itertools.chain(*sizes.values()))
            may_begin = has_room(sizes[identity], every, limit, units * UNIT)
            assert pending.has_room(identity, units * UNIT) == may_begin
            if may_begin:
                pending.begin(identity, units * UNIT)
                sizes[identity].append(units * UNIT)
        elif sizes[identity]:
            pending.end(identity, sizes[identity].pop())
        assert len(pending) == sum(map(len, sizes.values()))


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.00007, 0.0002, None])), max_size=100)
)
def test_in_each_turn_an_identity_has_a_slice(steps):
    """None: the next turn of the event loop begins."""
    soon: list[Callable[[], None]] = []
    now_s = [0.0]
    slices = admission.TurnSlices(lambda: now_s[0], soon.append)
    for identity in "ab":
        slices.note(identity, 0.0)
    used_s: collections.Counter[str] = collections.Counter()
    for identity, seconds in steps:
        if seconds is None:
            for begin in soon:
                begin()
            soon.clear()
            used_s.clear()
        else:
            started_s = slices.start()
            now_s[0] += seconds
            slices.stop(identity, started_s)
            used_s[identity] += seconds
        assert len(soon) == bool(used_s), "it is called once in each turn"
        assert abs(slices.total - 1000 * sum(used_s.values())) < 1e-6
        for each in "abc":
            assert slices.is_left(each) == (used_s[each] < admission.SLICE_MS / 1000 - 1e-9)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 1.0, 9.0, 11.0])), max_size=60))
def test_an_identity_that_is_alone_has_all_of_each_turn(steps):
    slices, now_s, last, shared_until_s = admission.TurnSlices(lambda: 0.0, lambda _: None), 0.0, "", 0.0
    for identity, wait_s in steps:
        now_s += wait_s
        slices.note(identity, now_s)
        if identity != last:  # the other one was here before
            last, shared_until_s = identity, now_s + admission.ALONE_S if last else 0.0
        assert slices.is_shared == (now_s < shared_until_s)
        slices.stop(identity, slices.start() - 1.0)
        assert slices.is_left(identity) == (not slices.is_shared)


@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)) | st.none(), max_size=80),
)
def test_waiting_work_is_bounded_and_served_in_turns_and_each_identity_in_order(limit, steps):
    """None: a work is taken. A simpler model: queues, and how often each identity was passed over."""
    waiting: admission.IdentityQueues[int] = admission.IdentityQueues(limit)
    queues: dict[str, list[tuple[int, int]]] = {"a": [], "b": [], "c": []}
    passed = dict.fromkeys(queues, 0)

    for number, step in enumerate(steps):
        if step is not None:
            identity, size = step[0], step[1] * UNIT
            own = [size for _, size in queues[identity]]
            every = [size for queue in queues.values() for _, size in queue]
            may_wait = has_room(own, every, limit, size)
            assert waiting.add(identity, number, size) == may_wait
            if may_wait:
                queues[identity].append((number, size))
        elif any(queues.values()):
            identity, taken = waiting.next()
            assert queues[identity].pop(0)[0] == taken
            passed = {each: passed[each] + 1 if queues[each] else 0 for each in queues}
            passed[identity] = 0
            assert max(passed.values()) <= 2, "each of the others was served once in the meantime"
        assert len(waiting) == sum(map(len, queues.values()))
        assert all((each in waiting) == bool(queues[each]) for each in queues)


async def test_of_messages_that_wait_for_a_turn_nothing_is_read_and_their_order_is_kept():
    """Of a thousand messages that arrive at once those of others pass all but a slice."""
    net = network.SimulatedNetwork(seed=1)
    handled: list[tuple[str, bytes]] = []

    async with await net.connect("service") as bus:
        loop = asyncio.get_running_loop()
        now_s = itertools.count()
        admission.of_loop(loop).slices = admission.TurnSlices(
            lambda: next(now_s) * admission.SLICE_MS / 10_000, loop.call_soon
        )
        serving = server.RpcServer(bus, "lamps", [])
        pattern = "muster.lamps.from.*.read.state"

        def handle(message: api.Message) -> None:
            requests.accept(message, pattern, serving.refused, admit=serving.admit)
            handled.append((message.subject.split(".")[3], message.data))

        receive = serving.in_turn(pattern, handle)

        def arrive(identity: str, data: bytes) -> None:
            subject, reply = f"muster.lamps.from.{identity}.read.state", f"_R.@lamps.{identity}.1"
            receive(
                received.ReceivedMessage(subject, reply, data, None, cast("received.ReplyConnection", None))
            )

        arrive("ann", b"first")
        arrive("flood", b"first")
        handled.clear()
        for number in range(400):
            arrive("flood", b"%d" % number)
        arrive("ann", b"later")
        before = [identity for identity, _ in handled]
        assert before.count("flood") <= 10, "a slice"
        assert "ann" in before
        await eventually(lambda: serving.pending == 0)
        of_flood = [data for identity, data in handled if identity == "flood"]
        assert of_flood == [b"%d" % number for number in range(400)]


async def test_messages_that_wait_are_handled_while_another_identity_uses_each_turn():
    """Searches and other work in steps of a slice continue for seconds."""
    net = network.SimulatedNetwork(seed=1)
    handled: list[bytes] = []
    now_s = [0.0]

    async with await net.connect("service") as bus:
        loop = asyncio.get_running_loop()
        admission.of_loop(loop).slices = admission.TurnSlices(lambda: now_s[0], loop.call_soon)
        serving = server.RpcServer(bus, "lamps", [])

        async def search() -> None:
            while True:
                now_s[0] += 2 * admission.SLICE_MS / 1000
                await asyncio.sleep(0)

        def handle(message: api.Message) -> None:
            now_s[0] += admission.SLICE_MS / 2000
            handled.append(message.data)

        receive = serving.in_turn("muster.lamps.from.*.read.state", handle)

        def arrive(identity: str, data: bytes) -> None:
            subject, reply = f"muster.lamps.from.{identity}.read.state", f"_R.@lamps.{identity}.1"
            receive(
                received.ReceivedMessage(subject, reply, data, None, cast("received.ReplyConnection", None))
            )

        arrive("ann", b"first")
        searching = asyncio.create_task(server.metered("ann", search))
        await asyncio.sleep(0)
        for number in range(20):
            arrive("bob", b"%d" % number)
        handled.remove(b"first")
        assert len(handled) <= 3, "a slice"
        for _ in range(25):
            await asyncio.sleep(0)
        searching.cancel()
        assert handled == [b"%d" % number for number in range(20)]
