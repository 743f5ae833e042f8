"""What others call: users, web, cli, simulate.

fleet = client.Client(bus)
await fleet.apply(open("fleet.yaml").read())
await fleet.wait("web-1", "up")
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from muster.bus import api
from muster.core import errors, messages
from muster.manage import manifest, protocol, requests
from muster.manage.adapters import catalogue

TIMEOUT_S = 30.0
READ_TRY_S = 2.0
LOOK_S = 2.0  # a state may have been missed: look again


class Client:
    def __init__(self, bus: api.Bus, *, timeout_s: float = TIMEOUT_S) -> None:
        self._bus = bus
        self._timeout_s = timeout_s

    # What should be

    async def apply(self, text: str) -> dict[str, Any]:
        """The text of a manifest. Returns the plan and what changed; `manifest.Fault` says line and field."""
        found: dict[str, Any] = await self._ask("apply", entries=_entries(text))
        return found

    async def plan(self, text: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._read("plan", entries=_entries(text))
        return found

    async def delete(self, *names: str) -> dict[str, Any]:
        """Returns when it is noted; `wait_gone` waits for it."""
        found: dict[str, Any] = await self._ask("delete", names=list(names))
        return found

    async def delete_manifest(self, text: str) -> dict[str, Any]:
        return await self.delete(*(entry["name"] for entry in _entries(text)))

    async def drain(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("drain", name=name)
        return found

    async def undrain(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("undrain", name=name)
        return found

    async def forget(self, agent: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("forget", agent=agent)
        return found

    # What is

    async def get(self, *names: str, where: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._read("get", names=list(names), where=where)
        return found

    async def describe(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._read("describe", name=name)
        return found

    async def agents(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._read("agents")
        return found

    async def managers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._read("managers")
        return found

    async def watch(self) -> AsyncIterator[protocol.State]:
        """Changes of health, as managers say them."""
        async with await self._bus.subscribe(protocol.STATES) as subscription:
            async for message in subscription:
                try:
                    yield messages.decode(message.data, protocol.State)
                except errors.InvalidInput:
                    continue  # of a version that this does not know

    async def wait(self, name: str, state: str, *, timeout_s: float = 30.0) -> dict[str, Any]:
        """Until the registry says so of it."""
        row: dict[str, Any] = {}

        async def look() -> bool:
            nonlocal row
            row = (await self.get(name))[0]
            return bool(row["state"] == state and row["applied"])

        await self._until(look, timeout_s, lambda: f"{name} is {row.get('state')}: {row.get('reason')}")
        return row

    async def wait_gone(self, *names: str, timeout_s: float = 30.0) -> None:
        async def look() -> bool:
            there = {row["name"] for row in await self.get()}
            return not there & set(names)

        await self._until(look, timeout_s, lambda: f"{', '.join(names)}: not gone yet")

    async def _until(self, look: Any, timeout_s: float, problem: Any) -> None:
        """Look, and again at each change of any state."""
        try:
            async with asyncio.timeout(timeout_s), await self._bus.subscribe(protocol.STATES) as changes:
                wait_s = 0.05
                while not await look():
                    try:
                        await changes.next(timeout_s=wait_s)
                    except errors.TimedOut:
                        wait_s = min(LOOK_S, wait_s * 1.5)
        except TimeoutError:
            raise errors.TimedOut(f"after {timeout_s:g} s {problem()}") from None

    # Acts

    async def exec(
        self,
        operation: str,
        *names: str,
        where: str = "",
        arguments: dict[str, Any] | None = None,
        timeout_s: float = protocol.OPERATION_TIMEOUT_S,
        id: str | None = None,
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._ask(
            "exec",
            extra_s=timeout_s,
            operation=operation,
            names=list(names),
            where=where,
            arguments=arguments or {},
            timeout_s=timeout_s,
            id=id or secrets.token_hex(8),
        )
        return found

    async def logs(self, name: str) -> str:
        answer = (await self.exec("logs", name))[0]
        if answer["outcome"] != messages.Outcome.DONE.value:
            raise errors.Unavailable(f"{name}: {answer['reason']}")
        return str(answer["result"])

    async def rollout(self, plan: dict[str, Any], *names: str, where: str = "") -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("rollout", plan=plan, names=list(names), where=where)
        return found

    async def rollouts(self, id: str | None = None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._read("rollouts", id=id)
        return found

    async def pause(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("pause", id=id)
        return found

    async def resume(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("resume", id=id)
        return found

    async def decisions(self, *, last: int = 100) -> list[messages.Decision]:
        """The audit's end; for operators, who may read streams."""
        stream = await self._bus.open_stream(messages.DECISIONS_STREAM)
        state = await stream.state()
        first = max(state.first_sequence, state.last_sequence - last + 1)
        if not state.messages:
            return []
        return [
            messages.decode(one.data, messages.Decision)
            async for one in stream.read(first, state.last_sequence, gaps=True)
        ]

    async def _ask(self, verb: str, *, extra_s: float = 0.0, **arguments: Any) -> Any:
        subject = protocol.request(self._bus.identity, verb)
        return await requests.ask(self._bus, subject, patience_s=self._timeout_s + extra_s, **arguments)

    async def _read(self, verb: str, **arguments: Any) -> Any:
        subject = protocol.read(self._bus.identity, verb)
        return await requests.ask(
            self._bus, subject, patience_s=self._timeout_s, try_s=READ_TRY_S, **arguments
        )


def _entries(text: str) -> list[Any]:
    found: list[Any] = msgspec.to_builtins(manifest.read(text, catalogue.checks()))
    return found
