"""The publish methods of a stream, all based on a batch. Shared by the real and the simulated stream."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Sequence

from muster.bus import api


class StreamPublisher(abc.ABC):
    """``publish``, ``store`` and ``store_soon`` of `api.Stream`, for classes with a ``publish_batch``."""

    __slots__ = ()

    @abc.abstractmethod
    async def publish_batch(
        self, messages: Sequence[api.OutgoingMessage], *, timeout_s: float = api.DURABLE_TIMEOUT_S
    ) -> int: ...

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: api.Headers | None = None,
        message_id: str | None = None,
        expected_last_sequence: int | None = None,
        expected_last_subject_sequence: int | None = None,
        ttl_s: float | None = None,
        timeout_s: float = api.DURABLE_TIMEOUT_S,
    ) -> int:
        message = api.OutgoingMessage(
            subject,
            data,
            headers or {},
            message_id,
            expected_last_sequence,
            expected_last_subject_sequence,
            ttl_s,
        )
        return await self.store(message, timeout_s=timeout_s)

    async def store(self, message: api.OutgoingMessage, *, timeout_s: float = api.DURABLE_TIMEOUT_S) -> int:
        return await self.publish_batch((message,), timeout_s=timeout_s)

    def store_soon(
        self, message: api.OutgoingMessage, *, timeout_s: float = api.DURABLE_TIMEOUT_S
    ) -> asyncio.Future[int]:
        return asyncio.ensure_future(self.store(message, timeout_s=timeout_s))
