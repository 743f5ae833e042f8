"""Requests to the pipeline: reads of the fleet and the job, and operations of operators."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from muster.bus.rpc import server
from muster.core import errors, messages
from muster.core.reports import columns
from muster.pipeline import protocol
from muster.pipeline.alerts import contact_tests, tracker
from muster.pipeline.fleet import removal
from muster.pipeline.job import batch_commit

SILENCE_S_MAX = 10 * 365 * 86400.0
ALERTS_MAX = 1_000  # in one page, as far as they fit


class PipelineRequestHandler:
    """``batches`` returns the progress of recent batches, newest last; ``check`` raises an error if this
    process is not the driver; ``stop`` ends the service."""

    def __init__(
        self,
        known: batch_commit.BatchCommitter,
        operators: tuple[str, ...],
        *,
        progress: Callable[[], protocol.BatchProgress],
        batches: Callable[[], list[protocol.BatchProgress]],
        check: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        self._committer = known
        self._operators = operators
        self._progress = progress
        self._batches = batches
        self._check = check
        self._bus = known.bus
        self._stop = stop
        self._changing = asyncio.Lock()

    def operations(self) -> list[server.RpcOperation]:
        return [
            server.RpcOperation("read.status", self._read_status),
            server.RpcOperation("read.batches", self._read_batches),
            server.RpcOperation("read.alerts", self._read_alerts),
            server.RpcOperation("read.silences", self._read_silences),
            server.RpcOperation("read.latest", self._read_latest),
            server.RpcOperation("request.acknowledge", self._acknowledge, target=_target),
            server.RpcOperation("request.resolve", self._resolve, target=_target),
            server.RpcOperation("request.silence", self._silence, target=_target),
            server.RpcOperation("request.unsilence", self._unsilence),
            server.RpcOperation("request.remove", self._remove, target=_selection),
            server.RpcOperation(
                "request.test",
                self._test,
                what="alert-test",
                target=_target,
                timeout_s=contact_tests.TIMEOUT_S,
            ),
            server.RpcOperation("request.stop", self._end, what="pipeline-stop"),
        ]

    async def authorize(
        self, call: server.RpcCall, operation: server.RpcOperation, arguments: Mapping[str, Any]
    ) -> None:
        self._check()
        if operation.kind == server.READ or "*" in self._operators or call.identity in self._operators:
            return
        raise errors.Forbidden(
            f"{call.identity} may not {operation.name.rpartition('.')[2]}",
            hint="the setting pipeline.operators lists the allowed identities",
        )

    # Reads

    async def _read_status(self, call: server.RpcCall) -> protocol.BatchProgress:
        return self._progress()

    async def _read_batches(self, call: server.RpcCall) -> list[protocol.BatchProgress]:
        return self._batches()

    async def _read_alerts(
        self, call: server.RpcCall, after: str = "", limit: int = ALERTS_MAX
    ) -> dict[str, Any]:
        """In pages, because thousands may be open."""
        limit = max(1, min(limit, ALERTS_MAX))
        rows = self._committer.alert_tracker.page(after, limit + 1)
        return server.page(rows, tracker.alert_key, rows_max=limit)

    async def _read_silences(
        self, call: server.RpcCall, after: str = "", limit: int = server.PAGE_ROWS
    ) -> dict[str, Any]:
        rows = sorted(self._committer.alert_tracker.silences(), key=_id)
        return server.page(rows, _id, after, limit)

    async def _read_latest(
        self, call: server.RpcCall, scope: str, name: str = ""
    ) -> messages.WireMessage | None:
        return self._committer.latest(scope, name)

    # Changes

    async def _acknowledge(self, call: server.RpcCall, rule: str, about: str) -> None:
        async with self._changing:
            await self._committer.store_updates(
                self._committer.alert_tracker.acknowledge(rule, about, call.identity, _now_ms())
            )

    async def _resolve(self, call: server.RpcCall, rule: str, about: str) -> None:
        async with self._changing:
            await self._committer.store_updates(self._committer.alert_tracker.resolve(rule, about, _now_ms()))

    async def _silence(
        self,
        call: server.RpcCall,
        covers: str,
        for_s: Annotated[float, msgspec.Meta(gt=0, le=SILENCE_S_MAX)],
        from_ms: messages.TimeMs | None = None,
        reason: str = "",
    ) -> tracker.Silence:
        async with self._changing:
            now_ms = _now_ms()
            # The clock of the stream is behind while the pipeline catches up.
            begin_ms = min(now_ms, self._committer.clock_ms or now_ms)
            made = tracker.Silence(
                id=uuid.uuid4().hex[:8],
                covers=covers,
                from_ms=begin_ms if from_ms is None else from_ms,
                until_ms=(now_ms if from_ms is None else from_ms) + int(for_s * 1000),
                by=call.identity,
                reason=reason,
            )
            await self._committer.store_updates(self._committer.alert_tracker.silence(made, now_ms))
            return made

    async def _unsilence(self, call: server.RpcCall, id: str) -> None:
        async with self._changing:
            await self._committer.store_updates(self._committer.alert_tracker.unsilence(id))

    async def _test(self, call: server.RpcCall, receiver: str) -> list[tracker.DeliveryResult]:
        """Send a test notification to a contact."""
        sender = self._committer.sender
        results = await contact_tests.run(
            receiver, sender.contacts, sender.settings, by=call.identity, now_ms=_now_ms()
        )
        if any(result.outcome != "sent" for result in results):
            call.outcome = messages.DecisionOutcome.FAILED
        for result in results:
            reply = f" (HTTP status {result.status})" if result.status else ""
            call.details[result.transport] = result.reason[:200] or f"{result.outcome}{reply}"
        return results

    async def _remove(
        self, call: server.RpcCall, machines: tuple[str, ...] = (), where: str = ""
    ) -> dict[str, Any]:
        """Stored in the stream of reports: the next batch applies it."""
        request = removal.MachineRemoval(machines=machines, where=where)
        request.validate()
        stream = await self._bus.open_stream(columns.REPORTS_STREAM)
        stored = await stream.publish(
            protocol.removal(self._bus.identity),
            msgspec.json.encode(request),
            message_id=uuid.uuid4().hex,
        )
        return {"sequence": stored}

    async def _end(self, call: server.RpcCall) -> None:
        self._stop()


def _now_ms() -> int:
    return int(time.time() * 1000)


def _id(silence: tracker.Silence) -> str:
    return silence.id


def _selection(arguments: Mapping[str, Any]) -> str:
    return str(arguments.get("where") or ", ".join(map(str, arguments.get("machines", ())))[:200])


def _target(arguments: Mapping[str, Any]) -> str:
    for field in ("covers", "receiver"):
        if field in arguments:
            return str(arguments[field])
    return f"{arguments['rule']} {arguments['about']}" if "rule" in arguments else "-"
