from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from muster.app import parts
from muster.core import errors


def test_order_is_by_need_then_by_name():
    needs = {"c": ["a"], "b": ["a"], "a": [], "d": ["c", "b"], "e": []}
    assert parts.start_order(needs) == ["a", "e", "b", "c", "d"]


def test_a_circle_is_named():
    with pytest.raises(errors.InvalidInput, match=r"a -> b -> a|b -> a -> b"):
        parts.start_order({"a": ["b"], "b": ["a"]})


def test_a_need_that_is_not_there_is_named():
    with pytest.raises(errors.InvalidInput, match="'a' depends on 'x'"):
        parts.start_order({"a": ["x"]})


@dataclass
class Example:
    name: str
    story: list[str]
    depends_on: Sequence[str] = ()
    vital: bool = False
    fault: Exception | None = None
    later: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, context: parts.Spawn) -> None:
        self.story.append(f"start {self.name}")
        if self.fault is not None:
            raise self.fault
        context(self._work())

    async def _work(self) -> None:
        await self.later.wait()
        raise RuntimeError(f"{self.name} broke")

    async def stop(self) -> None:
        self.story.append(f"stop {self.name}")

    def health(self) -> parts.Health:
        return parts.Health(parts.State.HEALTHY)


def team(story: list[str], *members: Example) -> parts.Team:
    return parts.Team(
        members,
        context_for=lambda part, spawn: spawn,
        on_failure=lambda name, error: story.append(f"failed {name}: {error}"),
    )


async def test_parts_start_in_order_and_stop_in_reverse():
    story: list[str] = []
    members = team(story, Example("b", story, ["a"]), Example("a", story), Example("c", story, ["b"]))
    await members.start()
    assert {name: health.state.value for name, health in members.health().items()} == dict.fromkeys(
        "abc", "healthy"
    )
    await members.stop()
    assert story == ["start a", "start b", "start c", "stop c", "stop b", "stop a"]


async def test_without_a_part_that_is_not_vital_the_others_go_on_but_not_its_dependants():
    story: list[str] = []
    broken = Example("b", story, fault=errors.Unavailable("no luck"))
    members = team(story, Example("a", story), broken, Example("c", story, ["b"]), Example("d", story))
    await members.start()
    states = {name: health.state.value for name, health in members.health().items()}
    assert states == {"a": "healthy", "b": "failed", "c": "failed", "d": "healthy"}
    assert members.health()["b"].reason == "no luck"
    assert "b" in members.health()["c"].reason
    assert not members.fatal.is_set()
    await members.stop()
    assert story[-3:] == ["stop d", "stop b", "stop a"]  # what began half-way is stopped too


async def test_a_vital_part_that_cannot_start_ends_the_start():
    story: list[str] = []
    vital = Example("b", story, vital=True, fault=errors.Unavailable("no luck"))
    members = team(story, Example("a", story), vital, Example("c", story))
    with pytest.raises(errors.Unavailable, match="no luck"):
        await members.start()
    await members.stop()
    assert story == ["start a", "start b", "failed b: no luck", "stop b", "stop a"]


@pytest.mark.parametrize("vital", [True, False])
async def test_a_task_that_fails_later_is_the_part_s_failure(vital):
    story: list[str] = []
    member = Example("a", story, vital=vital)
    members = team(story, member)
    await members.start()
    member.later.set()
    await asyncio.gather(*members.tasks(), return_exceptions=True)
    assert story == ["start a", "failed a: a broke"]
    assert members.health()["a"].state is parts.State.FAILED
    assert members.fatal.is_set() is vital
    await members.stop()


async def test_a_part_that_cannot_stop_is_reported_and_the_others_still_stop():
    story: list[str] = []

    class Stuck(Example):
        async def stop(self) -> None:
            raise RuntimeError("stuck")

    members = team(story, Example("a", story), Stuck("b", story))
    await members.start()
    await members.stop()
    assert story[-2:] == ["failed b: stuck", "stop a"]
