from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from muster.app.components import component
from muster.core import errors, health
from muster.supervision import tasks
from muster.testing.eventually import eventually


def test_order_is_by_need_then_by_name():
    needs = {"c": ["a"], "b": ["a"], "a": [], "d": ["c", "b"], "e": []}
    assert component.start_order(needs) == ["a", "e", "b", "c", "d"]


def test_a_circle_is_named():
    with pytest.raises(errors.InvalidInput, match=r"a -> b -> a|b -> a -> b"):
        component.start_order({"a": ["b"], "b": ["a"]})


def test_a_need_that_is_not_there_is_named():
    with pytest.raises(errors.InvalidInput, match="'a' depends on 'x'"):
        component.start_order({"a": ["x"]})


@dataclass
class Example:
    name: str
    story: list[str]
    depends_on: Sequence[str] = ()
    vital: bool = False
    fault: Exception | None = None
    later: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, context: Any) -> None:
        self.story.append(f"start {self.name}")
        if self.fault is not None:
            raise self.fault
        context.spawn("work", self._work(), on_failure=tasks.OnFailure.FATAL)

    async def _work(self) -> None:
        await self.later.wait()
        raise RuntimeError(f"{self.name} broke")

    async def stop(self) -> None:
        self.story.append(f"stop {self.name}")

    def health(self) -> component.ComponentHealth:
        return component.ComponentHealth()


def made(story: list[str], *members: Example) -> component.ComponentGroup:
    return component.ComponentGroup(
        members,
        context_for=lambda part, supervisor: cast(Any, supervisor),
        on_failure=lambda part, error: story.append(f"failed {part.name}: {error}"),
    )


async def test_parts_start_in_order_and_stop_in_reverse():
    story: list[str] = []
    members = made(story, Example("b", story, ["a"]), Example("a", story), Example("c", story, ["b"]))
    await members.start()
    assert [status.state.value for status in members.health().values()] == ["up"] * 3
    await members.stop()
    assert story == ["start a", "start b", "start c", "stop c", "stop b", "stop a"]


async def test_without_a_part_that_is_not_vital_the_others_go_on_but_not_its_dependants():
    story: list[str] = []
    broken = Example("b", story, fault=errors.Unavailable("no luck"))
    members = made(story, Example("a", story), broken, Example("c", story, ["b"]), Example("d", story))
    await members.start()
    states = {name: status.state.value for name, status in members.health().items()}
    assert states == {"a": "up", "b": "failed", "c": "failed", "d": "up"}
    assert members.health()["b"].reason == "no luck"
    assert "b" in members.health()["c"].reason
    await members.stop()
    assert story[-3:] == ["stop d", "stop b", "stop a"]  # what began half-way is stopped too


@pytest.mark.virtual_time
async def test_a_part_that_failed_at_its_start_is_started_again_with_its_dependants():
    story: list[str] = []
    announced: list[int] = []
    broken = Example("b", story, fault=errors.Unavailable("no luck"))
    members = made(story, Example("a", story), broken, Example("c", story, ["b"]))
    await members.start()

    async def announce() -> None:
        announced.append(len(story))

    members.retry_failed(on_start=announce)
    await asyncio.sleep(600)
    tries = story.count("start b")
    assert 8 <= tries <= 20
    assert story.count("stop b") == tries - 1  # each try begins anew
    assert story.count("failed b: no luck") == 1  # not reported again for each try
    assert members.health()["b"].reason == "no luck"
    broken.fault = None
    await asyncio.sleep(component.RETRY_S_MAX)
    assert [status.state.value for status in members.health().values()] == ["up"] * 3
    assert len(announced) == 2
    await members.stop()
    assert story[-3:] == ["stop c", "stop b", "stop a"]


@pytest.mark.virtual_time
async def test_a_start_that_is_repeated_ends_with_the_group():
    story: list[str] = []
    hangs = asyncio.Event()

    class Slow(Example):
        async def start(self, context: Any) -> None:
            await super().start(context)
            await hangs.wait()

    slow = Slow("a", story, fault=errors.Unavailable("no luck"))
    members = made(story, slow)
    await members.start()

    async def announce() -> None: ...

    members.retry_failed(on_start=announce)
    slow.fault = None
    await eventually(lambda: story.count("start a") == 2)
    await members.stop()
    assert story[-2:] == ["start a", "stop a"]


async def test_a_vital_part_that_cannot_start_ends_the_start():
    story: list[str] = []
    vital = Example("b", story, vital=True, fault=errors.Unavailable("no luck"))
    members = made(story, Example("a", story), vital, Example("c", story))
    with pytest.raises(errors.Unavailable, match="no luck"):
        await members.start()
    await members.stop()
    assert story == ["start a", "start b", "failed b: no luck", "stop b", "stop a"]


async def test_a_task_that_fails_later_is_the_part_s_failure():
    story: list[str] = []
    member = Example("a", story)
    members = made(story, member)
    await members.start()
    member.later.set()
    await eventually(lambda: len(story) == 2)
    assert story == ["start a", "failed a: a broke"]
    assert members.health()["a"].state is health.HealthState.FAILED
    await members.stop()


async def test_a_part_that_cannot_stop_is_reported_and_the_others_still_stop():
    story: list[str] = []

    class Stuck(Example):
        async def stop(self) -> None:
            raise RuntimeError("stuck")

    members = made(story, Example("a", story), Stuck("b", story))
    await members.start()
    await members.stop()
    assert story[-2:] == ["failed b: stuck", "stop a"]
