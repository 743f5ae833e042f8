"""The models of the domain and the grants in force.

Both are stored in the bucket ``notify``, which every notifier watches.  The request that adds a model, a
grant or a list of revocations gets its reply when all notifiers have seen it.

The restricted attributes of receivers are in their columns like all others.  They are a function of the
versions of grants and models, and of the time: the notifier writes them when one of the versions is not that
of the columns, and when a grant ends.  Those of a sender are looked up when it sends.  A grant that is
limited to a region or an audience applies only to the receivers there, so an event carries it separately
(`muster.notify.matcher.grant_scopes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from muster.bus import api
from muster.bus.rpc import server
from muster.core import errors, messages, subjects
from muster.notify import authorities, models, protocol
from muster.notify.matcher import matcher
from muster.notify.notifier import decision_log
from muster.notify.notifier import state as common_
from muster.notify.notifier.shards import members
from muster.predicates import types
from muster.trust import documents

_JSON = msgspec.json.Encoder()
PART = protocol.PART
KNOWN = subjects.to_all(PART, "known")
REGION = authorities.REGION
AT_ONCE = 5000  # receivers in one slice: takes some milliseconds


class GrantView:
    def __init__(
        self, common: common_.NotifierState, others: members.NotifierMembers, past: decision_log.DecisionLog
    ) -> None:
        self._common = common
        self._members = others
        self._history = past
        self._revision = 0
        self._revisions: dict[str, int] = {}  # by key
        self._changed = asyncio.Event()
        self._next_end = float("inf")
        self._declared: set[tuple[str, str]] = set()  # restricted attributes, by model
        self._derived: dict[str, int] = {}  # the version of each holder's grants that its receivers have
        self.version = 0  # of the vocabulary
        self._server: server.RpcServer | None = None

    async def start(self, bucket: api.KeyValue) -> None:
        self._bucket = bucket
        ready = asyncio.Event()
        self._common.tasks.loop("known grants", functools.partial(self._watch, ready))
        await ready.wait()
        await self._common.listen(KNOWN, self._confirm_revision)
        operations = [
            server.RpcOperation(
                "define", self._defined, decode=lambda data: messages.decode(data, protocol.DefineModel)
            ),
            server.RpcOperation(
                "trust", self._presented, decode=lambda data: messages.decode(data, protocol.PresentGrant)
            ),
        ]
        self._server = server.RpcServer(
            self._common.bus,
            PART,
            operations,
            codec=common_.NotifyCodec(),
            group=PART,
            at_once=1,
        )
        await self._server.start()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    # -- models and grants

    async def _watch(self, ready: asyncio.Event) -> None:
        common = self._common
        async with await self._bucket.watch() as watch:
            async for entry in watch:
                if entry is None:
                    await self._derive()
                    ready.set()
                    continue
                if entry.value is None:
                    self._common.known.remove_entry(entry.key)
                    self._revisions.pop(entry.key, None)
                else:
                    self._apply_entry(entry.key, entry.value)
                    self._revisions[entry.key] = entry.revision
                self.version += 1
                prefix, _, name = entry.key.rpartition(".")
                if prefix == f"model.{models.ModelKind.RECEIVER.value}" and (
                    model := common.known.vocabulary.receivers.get(name)
                ):
                    common.engine.define(model)
                if ready.is_set():
                    await self._derive()
                self._revision = entry.revision
                self._changed.set()

    def _apply_entry(self, key: str, value: bytes) -> None:
        try:
            self._common.known.apply_entry(key, value)
        except (
            errors.MusterError,
            msgspec.MsgspecError,
            UnicodeDecodeError,
            documents.DocumentRefused,
        ) as error:
            self._common.count("bad-record")
            common_.events.warning("bad-record", key=key, error=error)

    async def _defined(self, call: server.RpcCall, define: protocol.DefineModel) -> protocol.NotifyReply:
        call.target = f"{define.of}:{define.name}"
        value = messages.encode(define)
        revision = await self._put(lambda: (self._common.known.model_key(define), value, None))
        self._history.defined(define)
        await self._wait_for_all(revision)
        return protocol.NotifyReply(sequence=revision)

    async def _presented(self, call: server.RpcCall, present: protocol.PresentGrant) -> protocol.NotifyReply:
        knows = self._common.known

        def checked_entry() -> tuple[str, bytes, float | None]:
            if present.revocations:
                return knows.revocation_key(present.revocations), present.revocations.encode(), None
            key, for_s = knows.grant_key(present.chain, now=time.time())
            call.target = key
            return key, _JSON.encode(present.chain), for_s

        call.target = "revocations" if present.revocations else "grant"
        revision = await self._put(checked_entry)
        await self._wait_for_all(revision)
        return protocol.NotifyReply(sequence=revision)

    async def _put(self, checked_entry: Callable[[], tuple[str, bytes, float | None]]) -> int:
        """Store a checked entry; if another notifier stored one in the meantime, check again first."""
        while True:
            key, value, for_s = checked_entry()
            try:
                if (revision := self._revisions.get(key)) is None:
                    return await self._bucket.create(key, value, ttl_s=for_s)
                return await self._bucket.update(key, value, revision=revision, ttl_s=for_s)
            except (errors.AlreadyExists, errors.Conflict):
                if (held := await self._bucket.get(key)) is not None:
                    await self._wait_for_revision(held.revision)

    async def _wait_for_all(self, revision: int) -> None:
        """Wait until this notifier and the others have seen a revision of the bucket."""
        await self._wait_for_revision(revision)
        # A notifier that does not answer is removed soon, and then no request waits for it.
        while others := len(self._members.others()):
            answers = await self._common.bus.gather(
                KNOWN, str(revision).encode(), enough=others + 1, timeout_s=self._common.settings.beat_s
            )
            if len(answers) > others:
                return

    async def _wait_for_revision(self, revision: int) -> None:
        while self._revision < revision:
            self._changed.clear()
            await self._changed.wait()

    def _confirm_revision(self, message: api.Message) -> None:
        """Confirm the announcement of a revision to the notifier that gathers the confirmations."""

        async def when_known() -> None:
            with contextlib.suppress(ValueError, errors.MusterError):
                await self._wait_for_revision(int(message.data))
                await message.respond(b"known")

        self._common.tasks.spawn("confirmation", when_known())

    # -- senders

    def sender_attributes(
        self, process: str, name: str, state: models.State | None = None
    ) -> tuple[dict[str, Any], tuple[protocol.ScopedAttributes, ...]]:
        """Return the attributes of a sender for policies: its own state, and what authorities granted."""
        common = self._common
        receiver = protocol.participant_id(process, name)
        if receiver in common.engine:
            state = common.engine.state_of(receiver)
        own = {key: value for key, value in (state or {}).items() if not models.restricted(key)}
        effective = common.known.effective_attributes(process, name, now=time.time())
        granted = {key: held.value for key, held in effective.everywhere.items()}
        return {**own, **granted, "_process": process, "_id": receiver}, effective.within

    # -- receivers

    def apply_grants(self, receivers: Iterable[str]) -> None:
        """Set the restricted attributes of receivers to what is granted now."""
        now = time.time()
        engine, knows = self._common.engine, self._common.known
        listed = list(dict.fromkeys(receivers))
        for number, places, rows in engine.places(listed):
            table = engine.tables[number]
            restricted = {key: held for key, held in table.model.attributes.items() if models.restricted(key)}
            if not restricted:
                continue
            names = [listed[place] for place in places]
            regions = table.columns[REGION].cells(rows) if REGION in table.columns else [None] * len(names)
            # A process may have a million receivers, most of them with the same grants.
            alike: dict[tuple[str, str, str], tuple[list[types.Value], float]] = {}
            granted: list[tuple[list[types.Value], float]] = []
            for receiver, region in zip(names, regions, strict=True):
                process, _, name = receiver.partition("/")
                where = region if isinstance(region, str) and knows.has_regions(process) else ""
                key = (process, name if knows.has_prefixes(process) else "", where)
                if key not in alike:
                    held, until = knows.receiver_attributes(process, name, where, now=now)
                    fitting = {
                        attribute: held[attribute]
                        for attribute in held
                        if attribute in restricted and restricted[attribute].accepts(held[attribute])
                    }
                    alike[key] = ([fitting.get(attribute) for attribute in restricted], until)
                granted.append(alike[key])
            columns = {key: [cells[place] for cells, _ in granted] for place, key in enumerate(restricted)}
            ends_s = [until for _, until in granted]
            self._next_end = min(self._next_end, *(until for _, until in alike.values()))
            engine.write_granted(number, rows, columns, ends_s)
            self._history.log_granted(names, columns)

    def apply_grants_to_shard(self, shard: protocol.Shard) -> None:
        """Apply grants to a shard that was read from its log, which has no restricted attributes."""
        engine, knows = self._common.engine, self._common.known
        for number, table in enumerate(engine.tables):
            if any(map(models.restricted, table.model.attributes)):
                receivers = engine.names([matcher.MatchResult(number, table.rows_of(shard))])
                self.apply_grants(
                    receiver for receiver in receivers if knows.has_grants(receiver.partition("/")[0])
                )

    async def _derive(self) -> None:
        """Set the restricted attributes of all receivers whose grants or models have another version.

        In slices, so that events continue; returns when all receivers are up to date.  Receivers that join,
        move to another region or come with a shard are set when they do, by `apply_grants`.
        """
        engine, versions = self._common.engine, self._common.known.versions
        declared = {
            (table.model.name, key)
            for table in engine.tables
            for key in filter(models.restricted, table.model.attributes)
        }
        if declared != self._declared:
            self._declared = declared
            self._derived.clear()
        stale = {process for process in versions if self._derived.get(process) != versions[process]}
        receivers: list[str] = []
        for block in engine.name_blocks() if stale and declared else ():
            receivers += [receiver for receiver in block if receiver.partition("/")[0] in stale]
            await asyncio.sleep(0)
        for start in range(0, len(receivers), AT_ONCE):
            self.apply_grants(
                receiver for receiver in receivers[start : start + AT_ONCE] if receiver in engine
            )
            await asyncio.sleep(0)
        self._derived |= {process: versions[process] for process in stale}

    def moved(self, process: str, change: protocol.Change) -> bool:
        """Whether other grants may apply to the receivers after a change."""
        match change:
            case protocol.JoinReceiver() | protocol.JoinReceivers():
                return self._common.known.has_grants(process)
            case protocol.UpdateReceivers():
                return REGION in change.values and self._common.known.has_regions(process)
        return False

    def expire(self) -> None:
        """Remove granted attributes that have ended. Called before each decision."""
        now = time.time()
        if now < self._next_end:
            return
        self.apply_grants(self._common.engine.ended(now))
        self._next_end = self._common.engine.next_end_s()

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(self._common.settings.beat_s)
            self.expire()
