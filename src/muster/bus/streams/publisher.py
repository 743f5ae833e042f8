"""`api.Stream.publish`, based on a batch. Shared by the real and the simulated stream."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from muster.bus import api


class StreamPublisher(abc.ABC):
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
        return await self.publish_batch((message,), timeout_s=timeout_s)
