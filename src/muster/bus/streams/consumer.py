"""Durable consumers: the broker remembers the position, we fetch and acknowledge."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

from muster.bus import api, consumer_api, message_format
from muster.bus.client import connection
from muster.bus.streams import jetstream
from muster.core import errors, subjects

ITERATE_COUNT = 100
ITERATE_S = 5.0
RETRY_S = 0.25
GRACE_S = 1.0  # in addition to the timeout of the broker


async def ensure(
    storage: jetstream.JetStreamApi, stream: str, settings: consumer_api.ConsumerSettings
) -> NatsConsumer:
    """The consumer, created or brought to these settings."""
    name = subjects.token(settings.name)
    for subject in settings.filter_subjects:
        message_format.check_subject(subject, wildcards=True)
    config: dict[str, Any] = {
        "durable_name": name,
        "name": name,
        "ack_policy": "explicit",
        "ack_wait": round(settings.ack_wait_s * 1e9),
        "max_deliver": settings.max_deliver or -1,
        "max_ack_pending": settings.max_ack_pending,
        "deliver_policy": "all",
        "replay_policy": "instant",
    }
    if settings.filter_subjects:
        config["filter_subjects"] = list(settings.filter_subjects)
    if settings.start_sequence is not None:
        config.update(deliver_policy="by_start_sequence", opt_start_seq=settings.start_sequence)
    try:
        await storage.call(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})
    except jetstream.JetStreamRefused as error:
        raise errors.InvalidInput(error.message) from error
    return NatsConsumer(storage, stream, name)


class NatsDelivery:
    """See `consumer_api.StreamDelivery`."""

    __slots__ = ("_reply", "_wire", "message", "redelivered")

    def __init__(
        self,
        subject: bytes,
        reply: bytes,
        data: bytes,
        raw_headers: bytes | None,
        over: connection.NatsConnection,
    ) -> None:
        metadata = jetstream.DeliveryMetadata(reply)
        headers = jetstream.public_headers(message_format.decode_headers(raw_headers))
        self.message = api.StoredMessage(
            subject.decode(), data, headers, metadata.sequence, metadata.stored_at_ns
        )
        self.redelivered = metadata.count > 1
        self._reply = reply.decode()
        self._wire = over

    async def ack(self, *, confirmed: bool = False) -> None:
        if confirmed:
            await self._wire.requests.exchange(self._reply, b"+ACK", timeout_s=api.DEFAULT_TIMEOUT_S)
        else:
            self._wire.send(self._reply, b"+ACK")


class _Pull:
    """One pull request, until it has all messages or the broker reports its end."""

    def __init__(self, inbox: str, count: int) -> None:
        self.inbox = inbox
        self.count = count
        self.deliveries: list[consumer_api.StreamDelivery] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end_if_complete(self) -> None:
        if len(self.deliveries) >= self.count and not self.done.done():
            self.done.set_result(None)


class NatsConsumer:
    """See `consumer_api.StreamConsumer`."""

    def __init__(self, storage: jetstream.JetStreamApi, stream: str, name: str) -> None:
        self._api = storage
        self._wire = storage.wire
        self._place = f"{stream}.{name}"
        self._next = f"{jetstream.PREFIX}.CONSUMER.MSG.NEXT.{self._place}"
        self._about = f"the consumer {name!r} of {stream!r}"
        self._inbox = self._wire.fresh_inbox()
        self._number: int | None = None
        self._pulls = itertools.count(1)
        self._pull: _Pull | None = None
        self._one_at_a_time = asyncio.Lock()
        self._closed = False

    async def fetch(
        self, count: int, *, timeout_s: float = api.DEFAULT_TIMEOUT_S
    ) -> list[consumer_api.StreamDelivery]:
        if count < 1:
            raise errors.InvalidInput("fetch at least one")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        async with self._one_at_a_time:
            if self._number is None:
                self._number = await self._wire.listen(
                    self._inbox + ".*", "", self._received, timeout_s=api.DEFAULT_TIMEOUT_S, stored=True
                )
            # First fetch what is available; if there is nothing, wait for one message, and then fetch again.
            # A waiting request for many messages could not be ended early without leaving messages in
            # transit.
            try:
                deliveries = await self._request(count, 0.0)
            except errors.Unavailable:
                # raises an error if it does not exist any more
                await self._api.call(f"CONSUMER.INFO.{self._place}")
                raise
            left_s = deadline - loop.time()
            if not deliveries and left_s > 0:
                deliveries = await self._request(1, left_s)
                if deliveries and count > 1:
                    deliveries += await self._request(count - 1, 0.0)
            return deliveries

    async def _request(self, count: int, wait_s: float) -> list[consumer_api.StreamDelivery]:
        pull = self._pull = _Pull(f"{self._inbox}.{next(self._pulls)}", count)
        question: dict[str, Any] = {"batch": count}
        if wait_s > 0:
            question["expires"] = round(wait_s * 1e9)
        else:
            question["no_wait"] = True
        try:
            self._wire.send(self._next, json.dumps(question).encode(), pull.inbox)
            async with asyncio.timeout(wait_s + GRACE_S):
                await pull.done
        except TimeoutError:
            pass
        except errors.Unavailable:
            if not pull.deliveries:
                raise
        finally:
            self._pull = None
        return pull.deliveries

    def _received(self, subject: bytes, reply: bytes, data: bytes, raw_headers: bytes | None) -> None:
        pull = self._pull
        if reply.startswith(b"$JS.ACK."):
            if not subject:  # malformed: it is not delivered again
                self._wire.send(reply.decode(), b"+TERM")
                if pull is not None:
                    pull.count -= 1
                    pull.end_if_complete()
                return
            delivery = NatsDelivery(subject, reply, data, raw_headers, self._wire)
            if pull is None:
                # Too late for its request: return it, so that it is redelivered without waiting for its
                # timeout.
                self._wire.send(reply.decode(), b"-NAK")
                return
            pull.deliveries.append(delivery)
            pull.end_if_complete()
        elif pull is not None and subject.decode() == pull.inbox and not pull.done.done():
            status = message_format.status_of(raw_headers)
            if status in (404, 408):
                pull.done.set_result(None)
            elif status != 100:
                pull.done.set_exception(self._ended(message_format.decode_headers(raw_headers)))

    def _ended(self, headers: dict[str, str]) -> errors.MusterError:
        text = f"{self._about}: {headers.get('Description') or headers.get('Status', 'no reply')}"
        return errors.NotFound(text) if "Deleted" in text else errors.Unavailable(text)

    async def __aiter__(self) -> AsyncIterator[consumer_api.StreamDelivery]:
        while not self._closed:
            try:
                deliveries = await self.fetch(ITERATE_COUNT, timeout_s=ITERATE_S)
            except errors.Unavailable:
                # No connection or no leader now: unacknowledged deliveries are redelivered.
                self._wire.check_open()
                await asyncio.sleep(RETRY_S)
                continue
            for delivery in deliveries:
                yield delivery

    async def close(self) -> None:
        """Stop fetching. The broker stores the position: another consumer may continue from it."""
        self._closed = True
        if self._number is not None:
            self._wire.forget(self._number)
            self._number = None
