"""Durable streams on the brokers' storage."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from muster.bus import api, message_format
from muster.bus.client import connection, counters, requests
from muster.bus.streams import group_commit, jetstream, key_value, ordered_consumer, publisher
from muster.core import errors, subjects
from muster.core.telemetry import log

events = log.EventLog("bus")

READ_BATCH = 500
READ_BATCH_BYTES = 4 << 20


class StreamFactory:
    """The streams of one connection: shared by all of its handles."""

    def __init__(self, over: connection.NatsConnection, counts: counters.ConnectionCounters) -> None:
        self.wire = over
        self.api = jetstream.JetStreamApi(over)
        self._counts = counts
        self._committers: dict[str, group_commit.PublishCommitter] = {}

    def committer(self, name: str) -> group_commit.PublishCommitter:
        if name not in self._committers:
            on_full = functools.partial(self._full, name)
            self._committers[name] = group_commit.PublishCommitter(name, self.wire, on_full)
        return self._committers[name]

    def _full(self, name: str) -> None:
        self._counts.add(counters.ConnectionCounter.FULL)
        events.warning("stream-full", stream=name)

    async def drained(self) -> None:
        for committer in self._committers.values():
            await committer.drained()

    async def ensure(self, settings: api.StreamSettings) -> NatsStream:
        return NatsStream(self, await self.configure(stream_config(settings)))

    async def configure(self, config: dict[str, Any]) -> dict[str, Any]:
        """Create the stream, or change it to ``config`` except for its budget. Returns the resulting
        configuration."""
        name = config["name"]
        kept = {key: value for key, value in config.items() if key not in _BUDGET}
        try:
            return await self._update(name, kept)
        except errors.NotFound:
            pass  # and not the other way round: where room is scarce, a second creation is refused for that
        try:
            return (await self.api.call(f"STREAM.CREATE.{name}", config))["config"]  # type: ignore[no-any-return]
        except jetstream.JetStreamRefused as error:
            if error.err_code != jetstream.NAME_IN_USE:
                raise errors.InvalidInput(error.message) from error
        return await self._update(name, kept)  # another client was faster

    async def limit(self, name: str, config: dict[str, Any]) -> None:
        await self._update(subjects.token(name), config)

    async def _update(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
        there = (await self.api.call(f"STREAM.INFO.{name}"))["config"]
        _check_format(there)
        changed = there | config
        if "metadata" in config:  # the broker adds its own
            changed["metadata"] = there.get("metadata", {}) | config["metadata"]
        if changed["max_age"]:  # the broker requires that the window is not longer
            changed["duplicate_window"] = min(changed["duplicate_window"], changed["max_age"])
        if changed == there:
            return there  # type: ignore[no-any-return]
        try:
            return (await self.api.call(f"STREAM.UPDATE.{name}", changed))["config"]  # type: ignore[no-any-return]
        except jetstream.JetStreamRefused as error:
            raise errors.InvalidInput(
                error.message,
                hint="some settings of a stream cannot change: delete it, or choose another name",
            ) from error

    async def bucket(self, settings: api.KeyValueSettings) -> key_value.StreamKeyValue:
        config = stream_config(key_value.stream_settings(settings)) | {
            "deny_delete": True,
            "allow_rollup_hdrs": True,
            "subject_delete_marker_ttl": key_value.EXPIRY_MARKER_TTL_S * 1_000_000_000,
        }
        return key_value.StreamKeyValue(settings.bucket, NatsStream(self, await self.configure(config)))

    async def open(self, name: str) -> NatsStream:
        config = (await self.api.call(f"STREAM.INFO.{subjects.token(name)}"))["config"]
        _check_format(config)
        return NatsStream(self, config)

    async def names(self) -> list[str]:
        return sorted(name for page in await self._pages("STREAM.NAMES") for name in page)

    async def budgets(self) -> list[api.StreamBudget]:
        budgets = [
            api.StreamBudget(
                stream=info["config"]["name"],
                used_bytes=info["state"]["bytes"],
                limit_bytes=max(0, info["config"]["max_bytes"]),
                messages=info["state"]["messages"],
                on_full=_on_full(info["config"]),
                max_age_s=info["config"]["max_age"] / 1e9,
                replicas=info["config"]["num_replicas"],
                behind=tuple(
                    replica["name"]
                    for replica in (info.get("cluster") or {}).get("replicas") or ()
                    if replica.get("offline") or not replica.get("current")
                ),
            )
            for page in await self._pages("STREAM.LIST")
            for info in page
        ]
        return sorted(budgets, key=lambda budget: -budget.used_ratio)

    async def _pages(self, name: str) -> list[list[Any]]:
        pages: list[list[Any]] = []
        offset = 0
        while True:
            report = await self.api.call(name, {"offset": offset})
            page = report.get("streams") or []
            pages.append(page)
            offset += len(page)
            if not page or offset >= report["total"]:
                return pages

    async def remove(self, name: str) -> None:
        await self.api.call(f"STREAM.DELETE.{subjects.token(name)}", removes=True)


def budget(max_bytes: int, max_age_s: float, on_full: api.FullPolicy, replicas: int) -> dict[str, Any]:
    """The part of a stream's configuration that limits its size."""
    return {
        "max_bytes": max_bytes,
        "max_age": round(max_age_s * 1e9),
        "discard": "new" if on_full is api.FullPolicy.REFUSE else "old",
        "num_replicas": replicas,
    }


_BUDGET = ("max_bytes", "max_age", "discard", "num_replicas")


#: The format of what Muster stores in its streams, in their metadata. An earlier version refuses to open a
#: stream of a higher one.
FORMAT = 1
FORMAT_KEY = "muster.format"
RESTORED_KEY = "muster.restored"


def _check_format(config: dict[str, Any]) -> None:
    stored = (config.get("metadata") or {}).get(FORMAT_KEY, str(FORMAT))
    if not (stored.isdecimal() and int(stored) <= FORMAT):
        raise errors.Refused(
            f"the stream {config['name']} has format {stored[:20]}; this version of Muster reads {FORMAT}",
            hint="it was written by a newer version: use that one",
        )


def stream_config(settings: api.StreamSettings) -> dict[str, Any]:
    """The configuration of NATS for these settings."""
    if settings.max_bytes <= 0:
        raise errors.InvalidInput(f"the stream {settings.name!r} needs a budget: max_bytes must be positive")
    age_ns = round(settings.max_age_s * 1e9)
    window_ns = round(settings.duplicate_window_s * 1e9)
    for subject in settings.subjects:
        message_format.check_subject(subject, wildcards=True)
    return {
        "name": subjects.token(settings.name),
        "subjects": list(settings.subjects),
        **budget(settings.max_bytes, settings.max_age_s, settings.on_full, settings.replicas),
        "max_msgs_per_subject": settings.max_messages_per_subject or -1,
        "storage": "file",
        "duplicate_window": min(window_ns, age_ns) if age_ns else window_ns,
        "deny_delete": not settings.allow_delete,
        "deny_purge": not settings.allow_delete,
        "allow_direct": True,
        "allow_atomic": True,
        "allow_msg_ttl": True,
        "metadata": {FORMAT_KEY: str(FORMAT)},
    }


def _on_full(config: dict[str, Any]) -> api.FullPolicy:
    return api.FullPolicy.REFUSE if config["discard"] == "new" else api.FullPolicy.DROP_OLDEST


class NatsStream(publisher.StreamPublisher):
    """See `api.Stream`."""

    def __init__(self, streams: StreamFactory, config: dict[str, Any]) -> None:
        self._streams = streams
        self._api = streams.api
        self._wire = streams.wire
        self._name: str = config["name"]
        self._covers = subjects.SubjectPatternSet(config.get("subjects") or [])
        self._committer = streams.committer(self._name)

    def __repr__(self) -> str:
        return f"<stream {self._name!r}>"

    @property
    def name(self) -> str:
        return self._name

    # Writing.

    async def publish_batch(
        self, messages: Sequence[api.OutgoingMessage], *, timeout_s: float = api.DURABLE_TIMEOUT_S
    ) -> int:
        message_format.check_count(len(messages))
        for message in messages:
            message_format.check_outgoing(message)
            if not self._covers.match(message.subject):
                raise errors.InvalidInput(
                    f"the stream {self._name!r} does not cover {message.subject!r}, only {self._covers}"
                )
        return await self._committer.submit(messages, timeout_s)

    async def delete(self, sequence: int) -> None:
        if sequence < 1:
            raise errors.InvalidInput("sequences begin with 1")
        await self._api.call(
            f"STREAM.MSG.DELETE.{self._name}", {"seq": sequence, "no_erase": True}, removes=True
        )

    async def purge(self, *, subject: str | None = None, before: int | None = None) -> int:
        question: dict[str, Any] = {}
        if subject is not None:
            message_format.check_subject(subject, wildcards=True)
            question["filter"] = subject
        if before is not None:
            question["seq"] = before
        return int((await self._api.call(f"STREAM.PURGE.{self._name}", question))["purged"])

    # Reading.

    async def state(self) -> api.StreamState:
        info = await self._api.stream_info(self._name)
        state = info["state"]
        return api.StreamState(
            first_sequence=state["first_seq"] if state["messages"] else state["last_seq"] + 1,
            last_sequence=state["last_seq"],
            messages=state["messages"],
            bytes=state["bytes"],
            consumers=state["consumer_count"],
            now_ns=jetstream.nanoseconds(info["ts"]),
            created_ns=jetstream.nanoseconds(info["created"]),
            restored=(info["config"].get("metadata") or {}).get(RESTORED_KEY, ""),
            replicas=info["config"]["num_replicas"],
        )

    async def get(self, sequence: int) -> api.StoredMessage:
        if sequence < 1:
            raise errors.InvalidInput("sequences begin with 1")
        return await self._from_leader({"seq": sequence})

    async def last_for(self, subject: str) -> api.StoredMessage | None:
        message_format.check_subject(subject)
        try:
            return await self._from_leader({"last_by_subj": subject})
        except errors.NotFound:
            return None

    def check_open(self) -> None:
        self._wire.check_open()

    async def _from_leader(self, question: dict[str, Any]) -> api.StoredMessage:
        """Read one message from the leader: a replica may lag and return an older one.

        That applies to a stream of one replica too, because the number can be raised at any time.
        """
        message = (await self._api.call(f"STREAM.MSG.GET.{self._name}", question))["message"]
        raw_headers = base64.b64decode(message["hdrs"]) if "hdrs" in message else None
        return api.StoredMessage(
            subject=message["subject"],
            data=base64.b64decode(message.get("data", "")),
            headers=jetstream.public_headers(message_format.decode_headers(raw_headers)),
            sequence=message["seq"],
            stored_at_ns=jetstream.nanoseconds(message["time"]),
        )

    async def read(
        self, first: int, last: int | None = None, *, subject: str | None = None, gaps: bool = False
    ) -> AsyncIterator[api.StoredMessage]:
        async for message in self.read_all(first, last, subject=subject, gaps=gaps):
            if message_format.is_subject(message.subject):
                yield message

    async def read_all(
        self, first: int, last: int | None = None, *, subject: str | None = None, gaps: bool = False
    ) -> AsyncIterator[api.StoredMessage]:
        """Like `read`, with messages whose subject is malformed: the broker stores them."""
        if first < 1:
            raise errors.InvalidInput("sequences begin with 1")
        if subject is not None:
            message_format.check_subject(subject, wildcards=True)
        state = await self.state()
        if last is None:
            last = state.last_sequence
        elif last > state.last_sequence:
            raise errors.NotFound(f"{self._name!r} ends at {state.last_sequence}: {last} is not stored yet")
        strict = subject is None and not gaps
        position, ended = first, False
        while position <= last and not ended:
            page, ended = await self._page(position, last, subject)
            if not strict and (kept := (await self.state()).first_sequence) > position:
                raise self._dropped(position, min(last, kept - 1))
            for message in page:
                if strict and message.sequence != position:
                    raise self._dropped(position, min(last, message.sequence - 1))
                if message.sequence > last:
                    return
                yield message
                position = message.sequence + 1
        if strict and position <= last:
            raise self._dropped(position, last)

    async def _page(self, first: int, last: int, subject: str | None) -> tuple[list[api.StoredMessage], bool]:
        """Some messages from ``first`` on, and whether the stream holds none after them."""
        page, remaining = await self._direct_page(first, subject)
        if remaining or (page and page[-1].sequence >= last):
            return page, False
        # The replica has no more messages, but may lag: check with the leader.
        after = page[-1].sequence + 1 if page else first
        try:
            following = await self._from_leader({"seq": after, "next_by_subj": subject or ">"})
        except errors.NotFound:
            return page, True
        return [*page, following], False

    async def _direct_page(self, first: int, subject: str | None) -> tuple[list[api.StoredMessage], int]:
        """The messages of one request, and how many matching ones remain after them."""
        question: dict[str, Any] = {"seq": first, "batch": READ_BATCH, "max_bytes": READ_BATCH_BYTES}
        if subject is not None:
            question["next_by_subj"] = subject
        loop = asyncio.get_running_loop()
        deadline = loop.time() + api.DURABLE_TIMEOUT_S
        while loop.time() < deadline:
            answers = await self._collect(json.dumps(question).encode())
            if answers is not None:
                end = message_format.decode_headers(answers.pop().raw_headers)
                page = [jetstream.stored(answer.data, answer.raw_headers) for answer in answers]
                return page, int(end.get("Nats-Num-Pending", 0))
            await self.state()  # raises the reason of a missing reply, or waits until there is a leader
        raise errors.TimedOut(f"no replica of {self._name!r} responded within {api.DURABLE_TIMEOUT_S:g} s")

    async def _collect(self, question: bytes) -> list[requests.InboxReply] | None:
        """All messages of one batched read, the last being the broker's end mark; None if it broke off."""
        answers: list[requests.InboxReply] = []
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def take(answer: requests.InboxReply) -> None:
            answers.append(answer)
            status = message_format.status_of(answer.raw_headers)
            if status and not done.done():
                done.set_result(status in (204, 404))

        def fail(error: errors.MusterError) -> None:
            if not done.done():
                done.set_exception(error)

        subject = f"{jetstream.PREFIX}.DIRECT.GET.{self._name}"
        reply, end = self._wire.requests.expect((subject,), take, fail)
        try:
            self._wire.send(subject, question, reply)
            async with asyncio.timeout(jetstream.TRY_S):
                return answers if await done else None
        except TimeoutError:
            return None
        finally:
            end()

    def _dropped(self, first: int, last: int) -> errors.Dropped:
        return errors.Dropped(
            f"{self._name!r} does not retain {first} to {last} any more: removed by retention or deleted",
            first=first,
            last=last,
        )

    # Following.

    def follow(
        self, first: int, *, subject: str | None = None, gaps: bool = False
    ) -> ordered_consumer.NatsOrderedConsumer:
        return ordered_consumer.NatsOrderedConsumer(
            self._api,
            self._name,
            first=first,
            filters=(subject,) if subject is not None else (),
            strict=subject is None and not gaps,
        )

    def last_of_each(self, pattern: str, *, headers_only: bool) -> ordered_consumer.NatsOrderedConsumer:
        return ordered_consumer.NatsOrderedConsumer(
            self._api, self._name, first=None, filters=(pattern,), headers_only=headers_only
        )
