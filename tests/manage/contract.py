"""The contract of adapters. Subclass it with the type and two configurations.

``break_it`` does to the resource what the world does; None where nothing can be done from here.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from muster.core import errors, health, messages
from muster.manage import protocol
from muster.manage.agent import agent
from muster.testing.eventually import eventually

DONE = messages.DecisionOutcome.DONE


class AdapterContract:
    type_name: str
    restarts_alone = False  # whether its resource outlives the agent
    stops = True  # whether operations start and stop it
    speaks: str = ""  # a line in its log, if it has one
    runs_commands = False  # whether users run commands inside it

    @pytest.fixture
    def config(self, tmp_path: Any) -> dict[str, Any]:
        raise NotImplementedError

    @pytest.fixture
    def other(self, config: dict[str, Any]) -> dict[str, Any]:
        """Another configuration of the same resource."""
        raise NotImplementedError

    async def break_it(self, host: agent.Agent) -> bool:
        return False

    async def mend(self, host: agent.Agent) -> None:
        """Undo what hinders a start after `break_it`."""

    @pytest.fixture
    def broker_access(self) -> Any:
        return None

    @pytest.fixture
    async def host(self, connect: Any, tmp_path: Any, broker_access: Any) -> Any:
        async with agent.Agent(
            await connect("host"), tmp_path / "hosted", beat_s=0.2, broker_access=broker_access
        ) as made:
            yield made
            for resource in made.hosted.values():
                if resource.adapter is not None:
                    await resource.adapter.delete()

    number = 0

    async def do(self, host: agent.Agent, verb: str, *, epoch: int = 1, **more: Any) -> Any:
        AdapterContract.number += 1
        arguments = {"id": f"op-{AdapterContract.number}", "type": self.type_name, **more}
        operation = protocol.Operation(verb=protocol.Verb(verb), resource="thing", epoch=epoch, **arguments)
        return await host.execute(operation)

    def seen(self, host: agent.Agent) -> protocol.ObservedState:
        return host.hosted["thing"].observed

    async def test_it_is_made_seen_and_removed(self, host, config):
        assert not (await self.do(host, "get")).observed.exists
        made = await self.do(host, "create", config=config)
        assert made.outcome is messages.DecisionOutcome.DONE, made
        assert made.observed.exists
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        gone = await self.do(host, "delete")
        assert gone.outcome is messages.DecisionOutcome.DONE, gone
        assert not gone.observed.exists

    async def test_making_and_removing_twice_is_as_once(self, host, config):
        for _ in range(2):
            assert (await self.do(host, "create", config=config)).outcome is messages.DecisionOutcome.DONE
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        for _ in range(2):
            assert (await self.do(host, "delete")).outcome is messages.DecisionOutcome.DONE

    async def test_another_configuration_changes_its_digest(self, host, config, other):
        first = await self.do(host, "create", config=config)
        second = await self.do(host, "put", config=other)
        assert second.outcome is messages.DecisionOutcome.DONE, second
        assert first.observed.digest != second.observed.digest
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)

    async def test_a_change_of_what_is_stopped_does_not_start_it(self, host, config, other):
        await self.do(host, "create", config=config)
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        if not self.stops or (await self.do(host, "execute", operation="stop")).outcome is not DONE:
            return
        await eventually(lambda: self.seen(host).state is health.HealthState.DOWN)
        assert (await self.do(host, "put", config=other)).outcome is DONE
        assert (await self.do(host, "get")).observed.state is health.HealthState.DOWN

    async def test_an_operation_is_carried_out_once(self, host, config):
        first = await self.do(host, "create", config=config)
        again = await self.do(host, "create", config=config, id=first.id)
        assert again == first

    async def test_an_older_manager_is_refused(self, host, config):
        await self.do(host, "create", config=config, epoch=7)
        late = await self.do(host, "delete", epoch=6)
        assert late.code == errors.StaleEpoch.code
        assert self.seen(host).exists

    async def test_a_wrong_configuration_and_an_unknown_operation_are_refused(self, host, config):
        wrong = await self.do(host, "create", config={**config, "no_such_field": 1})
        assert wrong.outcome is messages.DecisionOutcome.REFUSED
        assert "no_such_field" in wrong.reason
        await self.do(host, "create", config=config)
        unknown = await self.do(host, "execute", operation="dance")
        assert unknown.outcome is messages.DecisionOutcome.REFUSED

    async def test_changes_of_the_resource_are_reported(self, host, config):
        await self.do(host, "create", config=config)
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        if not await self.break_it(host):
            pytest.skip("nothing can be done to it from here")
        await eventually(lambda: self.seen(host).state is health.HealthState.DOWN)
        assert self.seen(host).reason

    async def test_it_is_stopped_started_and_restarted(self, host, config):
        await self.do(host, "create", config=config)
        operations = (await self.do(host, "enumerate")).result["operations"]
        if not self.stops:
            return
        assert {"start", "stop", "restart", "drain"} <= {*operations}
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        for stop, start in (("stop", "start"), ("drain", "start"), ("restart", "restart")):
            for _ in range(2):  # a repetition changes nothing
                assert (
                    await self.do(host, "execute", operation=stop)
                ).outcome is messages.DecisionOutcome.DONE
            if stop != "restart":
                await eventually(lambda: self.seen(host).state is health.HealthState.DOWN)
                assert self.seen(host).exists
            assert (await self.do(host, "execute", operation=start)).outcome is messages.DecisionOutcome.DONE
            await eventually(lambda: self.seen(host).state is health.HealthState.UP)

    async def test_after_a_crash_it_is_started_again(self, host, config):
        await self.do(host, "create", config=config)
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        if not await self.break_it(host):
            pytest.skip("nothing can be done to it from here")
        await eventually(lambda: self.seen(host).state is health.HealthState.DOWN)
        await self.mend(host)
        assert (await self.do(host, "execute", operation="start")).outcome is messages.DecisionOutcome.DONE
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)

    async def test_the_inventory_contains_it_until_it_is_removed(self, host, config):
        await self.do(host, "create", config=config, epoch=3)
        reported = agent._reported(host.hosted["thing"])
        assert host._existing() == ["thing"]
        assert (reported.name, reported.epoch) == ("thing", 3)
        await self.do(host, "delete", epoch=3)
        assert host._existing() == []

    async def test_its_log_is_read_in_parts_and_followed(self, host, config):
        await self.do(host, "create", config=config)
        if not self.speaks:
            refused = await self.do(host, "execute", operation=protocol.LOG_PAGE)
            assert refused.outcome is not messages.DecisionOutcome.DONE or refused.result
            return
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)

        async def page(**query: Any) -> protocol.LogPage:
            answer = await self.do(host, "execute", operation=protocol.LOG_PAGE, arguments=query)
            assert answer.outcome is messages.DecisionOutcome.DONE, answer.reason
            return msgspec.convert(answer.result, protocol.LogPage)

        async def has_spoken() -> bool:
            return self.speaks in (await page()).text

        await eventually(has_spoken)
        first = await page()
        assert (await page(lines=0)).text == ""
        assert (await page(lines=1)).text.count("\n") <= 1
        assert (await page(cursor=first.cursor)).text == "", "nothing twice"
        await self.do(host, "execute", operation="restart")

        async def speaks_again() -> bool:
            return self.speaks in (await page(cursor=first.cursor)).text

        await eventually(speaks_again)

    async def test_commands_run_inside_it(self, host, config):
        await self.do(host, "create", config=config)
        script = "read word; echo got $word; echo bad >&2; exit 3"
        begin: dict[str, Any] = {"type": "begin", "command": ["sh", "-c", script]}
        begun = await self.do(host, "shell", operation="ann/1", arguments=begin)
        if not self.runs_commands:
            assert "no commands can be run inside" in begun.reason
            return
        assert begun.outcome is messages.DecisionOutcome.DONE, begun.reason
        plain = await self.talk(host, "ann/1", b"well\n", is_end=True)
        assert plain == ({1: "got well\n", 2: "bad\n"}, 3)
        script = "trap 'echo caught; exit 4' INT; stty size; tty; while :; do sleep 0.1; done"
        begin = {"command": ["sh", "-c", script], "terminal": "xterm", "rows": 31, "columns": 99}
        await self.do(host, "shell", operation="ann/2", arguments={"type": "begin", **begin})
        shown, code = await self.talk(host, "ann/2", b"\x03", after="/dev/")
        assert code == 4
        assert "31 99" in shown[1]
        assert "caught" in shown[1]
        left = {"type": "begin", "command": ["sh", "-c", "echo left; exec sleep 1000"]}
        await self.do(host, "shell", operation="ann/3", arguments=left)
        assert (await self.talk(host, "ann/3", b"", until="left"))[1] is None
        await self.do(host, "shell", operation="ann/3", arguments={"type": "exchange", "closes": True})
        ended = await self.do(host, "shell", operation="ann/3", arguments={"type": "exchange"})
        assert ended.code == errors.NotFound.code

    async def talk(
        self, host: agent.Agent, id: str, data: bytes, *, after: str = "", until: str = "", **more: Any
    ) -> tuple[dict[int, str], int | None]:
        """What a command writes, by stream, and its exit code. It gets ``data`` after it wrote ``after``."""
        texts, received, sent, code = {1: "", 2: ""}, 0, 0, None
        while code is None and not (until and until in texts[1]):
            is_time = after in texts[1] and sent < len(data)
            request = protocol.ShellExchange(
                received=received, sent=sent, wait_s=0.2, **({"data": data, **more} if is_time else {})
            )
            arguments = msgspec.to_builtins(request)
            answer = await self.do(host, "shell", operation=id, arguments=arguments)
            assert answer.outcome is messages.DecisionOutcome.DONE, answer.reason
            page = msgspec.convert(answer.result, protocol.ShellOutput)
            for number, part in page.chunks:
                texts[number] += part.decode()
            received, sent, code = received + len(page.chunks), page.taken, page.exit_code
        return texts, code

    async def test_an_agent_that_was_restarted_finds_it_again(self, host, config, connect, tmp_path):
        await self.do(host, "create", config=config)
        await eventually(lambda: self.seen(host).state is health.HealthState.UP)
        before = self.seen(host)
        await host.stop()
        async with agent.Agent(await connect("host2"), tmp_path / "hosted", name="host") as second:
            actual = await self.do(second, "get")
            assert actual.observed.exists
            assert actual.observed.digest == before.digest
            if self.restarts_alone:
                await eventually(lambda: self.seen(second).state is health.HealthState.UP)
                assert self.seen(second).properties.get("pid") == before.properties.get("pid")
            await self.do(second, "delete", epoch=2)
        host.hosted.clear()
        await asyncio.sleep(0)
