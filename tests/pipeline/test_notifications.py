"""A policy replayed over the records of real notifiers reaches the same receivers."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from muster.analyses import policy_replay as batch_replay
from muster.app.operations import policy_replay
from muster.bus.client import client as bus_client
from muster.core import errors, messages
from muster.notify import client, protocol
from muster.notify.matcher import kernels_numpy
from muster.notify.notifier import notifier
from muster.testing.eventually import eventually
from tests.cli import driver
from tests.notify.conftest import MODELS, QUICK

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests"),
]

POLICY = "alert AND threat_level >= 3 AND sender.entity <> 'jester'"
IIS = "application = 'IIS' AND load > 0.5"
ADDRESSES = (IIS, "application LIKE 'Apa%' OR services CONTAINS 'cgi'", "load IS NULL", "TRUE")


class Farm:
    """A farm whose servers come, change and go, and two who send alerts about them."""

    def __init__(self, farm: client.NotifyClient, senders: dict[str, client.ReceiverHandle]) -> None:
        self.chance = random.Random(5)
        self.farm = farm
        self.senders = senders
        self.state: dict[str, dict[str, Any]] = {}
        self.sent: list[tuple[str, int, set[str]]] = []  # sender, level, and the addressed receivers
        self.decided = 0

    async def join(self, name: str) -> None:
        state: dict[str, Any] = {
            "application": self.chance.choice(["IIS", "Apache"]),
            "services": self.chance.choice([("docs",), ("docs", "cgi")]),
            "load": self.chance.random(),
        }
        await self.farm.change(
            [protocol.JoinReceiver(receiver=name, model="WebServer", state=state, policy=POLICY)]
        )
        self.state[name] = state

    async def load(self, names: list[str]) -> None:
        loads = [self.chance.choice([None, self.chance.random()]) for _ in names]
        await self.farm.update(names, load=loads)
        for name, load in zip(names, loads, strict=True):
            self.state[name]["load"] = load

    async def leave(self, name: str) -> None:
        await self.farm.change([protocol.LeaveReceiver(receiver=name)])
        del self.state[name]

    async def send(self, sender: str, level: int, address: str) -> None:
        await self.senders[sender].send("alert", {"threat_level": level, "text": "it's 100 %"}, to=address)
        self.sent.append(
            (sender, level, {name for name, item in self.state.items() if _meant(item, address)})
        )
        # A transient event is admitted first and decided then: what changes meanwhile may count or not.
        await eventually(lambda: self.decided == len(self.sent))


def _meant(state: dict[str, Any], address: str) -> bool:
    load = state["load"]
    return {
        ADDRESSES[0]: state["application"] == "IIS" and load is not None and load > 0.5,
        ADDRESSES[1]: state["application"] == "Apache" or "cgi" in state["services"],
        ADDRESSES[2]: load is None,
        ADDRESSES[3]: True,
    }[address]


@contextlib.asynccontextmanager
async def world(url: str) -> AsyncIterator[Farm]:
    async with contextlib.AsyncExitStack() as stack:

        async def connect(name: str) -> bus_client.NatsBus:
            return await stack.enter_async_context(await bus_client.connect([url], identity=name, audit_s=0))

        served = await stack.enter_async_context(
            notifier.Notifier(await connect("n1"), QUICK, kernels=kernels_numpy)
        )
        await served.serving()
        farm = await stack.enter_async_context(client.NotifyClient(await connect("farm")))
        control = await stack.enter_async_context(client.NotifyClient(await connect("control")))
        for model in MODELS:
            await farm.define(model)
        senders = {
            name: await control.advertise(name, "Controller", {"entity": name})
            for name in ("chief", "jester")
        }
        made = Farm(farm, senders)
        keep = served._history.decided

        def decided(*reported: Any) -> None:
            keep(*reported)
            made.decided += 1

        served._history.decided = decided  # type: ignore[assignment, method-assign]
        yield made


async def played(url: str) -> Farm:
    """A day of it, kept by the notifier."""
    async with world(url) as made:
        for number in range(20):
            await made.join(f"w{number}")
        for number, address in enumerate(ADDRESSES * 2):
            await made.send("chief", number % 5 + 1, address)
            await made.load(made.chance.sample(sorted(made.state), 7))
            await made.send("jester", 5, address)
            await made.leave(f"w{number}")
            await made.send("chief", 4, address)
            if number % 3 == 0:
                await made.join(f"w{number}")
        async with await bus_client.connect([url], identity="reader") as bus:
            await eventually(lambda: _decided(bus, len(made.sent)), timeout_s=60)
        return made


async def _decided(bus: bus_client.NatsBus, expected: int) -> bool:
    stream = await bus.open_stream(protocol.STREAM_HISTORY)
    last = (await stream.state()).last_sequence
    actual = 0
    async for message in stream.read(1, last) if last else _nothing():
        try:
            messages.decode(message.data, protocol.DecisionRecord)
            actual += 1
        except messages.UnknownMessageKind:
            continue
    return actual == expected


async def _nothing() -> AsyncIterator[Any]:
    return
    yield


async def test_a_replayed_policy_reaches_the_same_receivers_and_a_changed_one_others(
    broker, spark, monkeypatch
):
    made = await played(broker.url)
    async with world(broker.url), await bus_client.connect([broker.url], identity="op") as bus:
        words = await policy_replay.load_vocabulary(bus)
    access = {"servers": broker.url}

    def ask(policy: str, **more: Any):
        return policy_replay.replay_notifications(spark, access, words, policy, **more)

    as_it_was = await asyncio.to_thread(ask, POLICY)
    expected = [len(meant) if level >= 3 and sender == "chief" else 0 for sender, level, meant in made.sent]
    assert [
        notification.reached for notification in as_it_was.notifications
    ] == expected  # or this test does not know its own world
    assert [notification.would_reach for notification in as_it_was.notifications] == expected
    assert (as_it_was.events, as_it_was.deliveries) == (len(made.sent), sum(expected))
    monkeypatch.setattr(batch_replay, "LISTED_MAX", 4)  # what is fetched is limited, what is counted is not
    others = await asyncio.to_thread(ask, "alert AND sender.entity = 'jester'")
    newest = [notification.id for notification in as_it_was.notifications[-4:]]
    assert [notification.id for notification in others.notifications] == newest
    reached = [meant for sender, _, meant in made.sent if sender == "jester"]
    assert others.deliveries == sum(map(len, reached))
    assert others.receivers == len(set().union(*reached))
    assert others.reached == sum(expected)
    with pytest.raises(errors.ParseError, match="treat_level"):
        await asyncio.to_thread(ask, "alert AND treat_level > 1")
    monkeypatch.setattr(batch_replay, "ADDRESSES_MAX", len(set(ADDRESSES)) - 1)
    with pytest.raises(errors.LimitExceeded, match="different addresses"):
        await asyncio.to_thread(ask, POLICY)


@pytest.mark.slow
async def test_the_command_line_replays_notifications(broker, tmp_path):
    made = await played(broker.url)
    async with world(broker.url):
        result = await asyncio.to_thread(
            driver.run,
            "pipeline",
            "replay",
            "alert AND threat_level = 5",
            "--address",
            IIS,
            "--notifications",
            "--server",
            broker.url,
            "-o",
            "json",
            home=tmp_path,
            timeout_s=300,
        )
    assert result.code == 0, result.err
    actual = result.json()
    assert actual["events"] == len(made.sent)
    # All events of the jester were of level 5; now they go to the receivers of another address.
    assert 0 < actual["deliveries"] < sum(len(meant) for _, level, meant in made.sent if level == 5)
