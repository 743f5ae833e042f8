"""What an agent hosts: resources with their adapters, what is done to them, and what is kept of it on disk.

An operation is carried out once, by its id, for the manager with the highest epoch.  An adapter that hangs is
given up at its operation's deadline (in doubt); one that raises anything at all costs its own operation and
nothing else.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec

from muster.core import errors, log, messages
from muster.manage import hosting, manifest, protocol
from muster.manage.adapters import base

events = log.Events("manage")

SYNCS_AT_ONCE = 8  # concurrent syncs share the disk's work
EVENTS_A_SECOND = 10  # of one resource; what is more is told by the next heartbeat
CHANGING = (
    *(protocol.Verb.PUT, protocol.Verb.CREATE, protocol.Verb.DELETE),
    *(protocol.Verb.RENAME, protocol.Verb.EXECUTE),
)


class Hosted(hosting.Hosted):
    """With its adapter, and what was last seen."""

    place: base.Place

    def __init__(self, record: hosting.Record) -> None:
        super().__init__(record)
        self.adapter: base.Adapter | None = None
        self.seen = protocol.Observed(False)
        self.lock = asyncio.Lock()
        self.saving = asyncio.Lock()
        self.stored = (record.epoch, record.manager)  # on disk
        self._second = 0
        self._told = 0

    def take_over(self, old: Hosted) -> None:
        """Be what ``old`` was; it is nothing from now on."""
        self.take_record(old)
        self.adapter, old.adapter = old.adapter, None
        self.seen, old.seen = old.seen, protocol.Observed(False)
        assert self.adapter is not None
        self.place.runtime, old.place.runtime = self.record.runtime, old.record.runtime
        self.adapter.place = self.place

    def allowance(self, now: float) -> bool:
        if int(now) != self._second:
            self._second, self._told = int(now), 0
        self._told += 1
        return self._told <= EVENTS_A_SECOND


class Household(abc.ABC):
    """Whoever has a road to managers tells them of what happens here (`muster.manage.agent`)."""

    def __init__(
        self, name: str, folder: pathlib.Path | None, adapters: Callable[[str], type[base.Adapter]]
    ) -> None:
        self.name = name
        self.hosted: dict[str, Hosted] = {}
        self._folder = folder
        self._adapters = adapters

    @abc.abstractmethod
    def _changed(self, one: Hosted, observed: protocol.Observed) -> None:
        """An adapter tells how its resource is."""

    @abc.abstractmethod
    def _happened(self, one: Hosted, what: str, **details: str) -> None:
        """An adapter tells of something else."""

    @abc.abstractmethod
    async def _stored_secret(self, one: Hosted, name: str) -> str:
        """Of the domain's store, for this resource."""

    async def _resume(self) -> None:
        """Find again what was hosted before a restart."""
        if self._folder is None:
            return
        for record in hosting.settled(await asyncio.to_thread(_load, self._folder)):
            one = self._host(record.name, record)
            if record.config is None:
                continue
            try:
                adapter = one.adapter = self._adapters(record.type)(one.place)
                await adapter.resume(base.convert(type(adapter), record.config))
            except errors.MusterError as error:
                events.warning("not-resumed", resource=record.name, error=error)

    async def obey(self, operation: protocol.Operation) -> protocol.Answer:
        """Carry out one operation, once."""
        one = self._host(operation.resource)
        async with one.lock:
            try:
                one.check(operation.epoch, operation.manager)
            except errors.StaleEpoch as error:
                events.warning("refused", resource=operation.resource, epoch=error.epoch, now=error.current)
                return hosting.refusal(operation.id, error, error.current)
            if operation.verb is protocol.Verb.OUTCOME:
                return one.remembered(operation.id) or protocol.Answer(
                    id=operation.id,
                    outcome=messages.Outcome.REFUSED,
                    code="never-begun",
                    reason="this agent was never told to do it",
                    epoch=one.record.epoch,
                )
            known = one.remembered(operation.id)
            if known is not None:
                return known
            changing = operation.verb in CHANGING
            if changing:
                one.begin(operation.id)
                await self._save(one)
            answer = await self._try(one, operation)
            if changing:
                one.end(answer)
                await self._save(one)
            return answer

    async def _try(self, one: Hosted, operation: protocol.Operation) -> protocol.Answer:
        outcome, code, reason, result = messages.Outcome.DONE, "", "", None
        try:
            async with asyncio.timeout(operation.timeout_s):
                result = await self._do(one, operation)
                await self._look(one)
        except TimeoutError:
            outcome, code = messages.Outcome.IN_DOUBT, "in-doubt"
            reason = f"the adapter did not answer in {operation.timeout_s:g} s"
        except errors.MusterError as error:
            refused = hosting.refusal(operation.id, error, one.record.epoch)
            outcome, code, reason = refused.outcome, refused.code, refused.reason
        except Exception as error:  # noqa: BLE001  (an adapter is others' code)
            outcome, code, reason = (
                messages.Outcome.FAILED,
                "adapter-failed",
                f"{type(error).__name__}: {error}",
            )
            events.error(
                "adapter-failed", resource=operation.resource, verb=operation.verb.value, error=error
            )
        return protocol.Answer(
            id=operation.id,
            outcome=outcome,
            result=result,
            code=code,
            reason=reason[:4000],
            observed=one.seen,
            epoch=one.record.epoch,
        )

    async def _do(self, one: Hosted, operation: protocol.Operation) -> Any:
        record = one.record
        match operation.verb:
            case protocol.Verb.GET:
                await self._look(one)
                return msgspec.to_builtins(one.seen)
            case protocol.Verb.CREATE | protocol.Verb.PUT:
                kind = self._adapters(operation.type or record.type)
                config = base.convert(kind, operation.config)
                digest = manifest.digest(operation.config)
                created = one.adapter is not None and record.config is not None
                if one.adapter is None or (not created and type(one.adapter) is not kind):
                    one.adapter = kind(one.place)
                record.type, record.config = kind.type_name, operation.config
                if created:
                    record.digest = ""  # until it is done, it has neither
                    await one.adapter.put(config)
                else:
                    await one.adapter.create(config, start=operation.start)
                record.digest = digest
            case protocol.Verb.DELETE:
                if one.adapter is not None and record.config is not None:
                    await one.adapter.delete()
                    await one.adapter.close()
                one.adapter, record.config, record.digest = None, None, ""
                record.runtime.clear()
                record.manager = ""  # nobody hears of it any more; its epoch stays
            case protocol.Verb.EXECUTE:
                return await self._require(one).execute(operation.operation, operation.arguments)
            case protocol.Verb.ENUMERATE:
                return {"resources": sorted(self.hosted), "operations": self._require(one).operations()}
            case protocol.Verb.RENAME:
                return await self._rename(one, str(operation.arguments.get("from", "")))
            case protocol.Verb.SUBSCRIBE:
                one.check(operation.epoch, operation.manager)
        return None

    def _require(self, one: Hosted) -> base.Adapter:
        if one.adapter is None or one.record.config is None:
            raise errors.NotFound(f"{one.record.name} does not exist on {self.name}")
        return one.adapter

    async def _rename(self, one: Hosted, former: str) -> dict[str, bool]:
        """``one`` takes over what ``former`` is; where that is nothing, nothing happens.

        The former name stays fenced by the new owner's epoch: a manager from before cannot bring it back.
        """
        old = self.hosted.get(former)
        if old is None or old is one or old.adapter is None or old.record.config is None:
            return {"renamed": False}
        async with old.lock:
            if one.record.config is not None:
                raise errors.AlreadyExists(f"{one.record.name} exists on {self.name} already")
            if not old.adapter.can_be_renamed:
                raise errors.Refused(f"a {old.record.type} cannot be renamed")
            old.check(one.record.epoch, "")
            if self._folder is not None:
                await asyncio.to_thread(_move, self._folder / former, self._folder / one.record.name)
            one.take_over(old)
            await self._save(one)  # first: what both claim after a crash is the new one's
            await self._save(old)
            one.record.formerly = ""
        return {"renamed": True}

    async def _look(self, one: Hosted) -> None:
        if one.adapter is None or one.record.config is None:
            one.seen = protocol.Observed(False)
            return
        one.seen = hosting.bounded(await one.adapter.observe(), one.record.digest)

    # What it keeps

    def _host(self, name: str, record: hosting.Record | None = None) -> Hosted:
        one = self.hosted.get(name)
        if one is None:
            one = self.hosted[name] = Hosted(record or hosting.Record(name=name))
            one.place = base.Place(
                name=name,
                folder=self._folder / name if self._folder is not None else None,
                changed=functools.partial(self._changed, one),
                happened=functools.partial(self._happened, one),
                runtime=one.record.runtime,
                neighbour=self._neighbour,
                stored=functools.partial(self._stored_secret, one),
            )
        return one

    def _neighbour(self, name: str) -> base.Adapter | None:
        one = self.hosted.get(name)
        return one.adapter if one is not None and one.record.config is not None else None

    async def _save(self, one: Hosted) -> None:
        if self._folder is not None:
            async with one.saving:  # one after the other: the last one has the last word
                await self._write(one, self._folder)

    async def _save_claims(self, claimed: list[Hosted]) -> None:
        """Only what is not on disk yet: a claim that took too long is repeated, and goes on where it was."""
        folder, ahead = self._folder, iter(claimed)
        if folder is None:
            return

        async def save_some() -> None:
            for one in ahead:
                async with one.saving:
                    if one.stored != (one.record.epoch, one.record.manager):
                        await self._write(one, folder)

        await asyncio.gather(*(save_some() for _ in range(SYNCS_AT_ONCE)))

    async def _write(self, one: Hosted, folder: pathlib.Path) -> None:
        stored = (one.record.epoch, one.record.manager)
        await asyncio.to_thread(_store, folder / f"{one.record.name}.json", one.to_store())
        one.stored = stored


def _move(old: pathlib.Path, new: pathlib.Path) -> None:
    """An adapter's folder goes with its name; files that are open stay open."""
    if old.exists() and not new.exists():
        old.rename(new)


def _load(folder: pathlib.Path) -> list[hosting.Record]:
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=hosting.Record))
        except (msgspec.MsgspecError, OSError) as error:
            events.warning("unreadable-record", file=path.name, error=error)
    return found


def _store(path: pathlib.Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
