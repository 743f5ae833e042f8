"""The audit of administrative requests: one `Decision` for each, in the stream ``decisions``.

The service writes it, so it does not matter which program sent the request.  A record that cannot be stored
is logged and counted; the act is not undone for it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from muster.bus import api
from muster.core import errors, log, messages, subjects

MAX_BYTES = 256 << 20
MAX_AGE_S = 365 * 86400.0

events = log.Events("audit")


class Audit:
    """Writes for the services of one part. ``epoch``: the term under which they act, if they have one.

    It takes the stream as it is, or makes it: only the domain's own process may change its limits.
    """

    def __init__(
        self,
        bus: api.Bus,
        part: str,
        *,
        epoch: Callable[[], int] = int,
    ) -> None:
        self.lost = 0  # records that could not be stored
        self._bus = bus
        self._part = part
        self._epoch = epoch
        self._stream: api.Stream | None = None

    async def record(
        self,
        what: str,
        target: str,
        why: str,
        *,
        who: str,
        outcome: messages.Outcome = messages.Outcome.DONE,
        on_behalf_of: str = "",
        id: str | None = None,
        **details: str,
    ) -> None:
        """Returns when the record is stored, or cannot be stored."""
        try:
            decision = messages.Decision(
                id=id or secrets.token_hex(8),
                who=who[:256],
                on_behalf_of=on_behalf_of[:256],
                what=subjects.token(what),
                target=target[:256] or "-",
                why=why[:4096] or f"{who} asked",
                at_ms=int(time.time() * 1000),
                epoch=self._epoch(),
                outcome=outcome,
                details={name: value[:1000] for name, value in details.items()},
            )
            if self._stream is None:
                self._stream = await self._open()
            await self._stream.publish(
                subjects.logged(self._part, "decision", what), messages.encode(decision)
            )
        except errors.MusterError as error:
            self.lost += 1
            events.error("not-recorded", what=what, target=target, by=who, error=error)

    async def _open(self) -> api.Stream:
        try:
            return await self._bus.open_stream(messages.DECISIONS_STREAM)
        except errors.NotFound:
            return await self._bus.stream(stream_settings())


def stream_settings(
    *, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S, replicas: int = 1
) -> api.StreamSettings:
    return api.StreamSettings(
        name=messages.DECISIONS_STREAM,
        subjects=(messages.DECISIONS_SUBJECTS,),
        max_bytes=max_bytes,
        max_age_s=max_age_s,
        replicas=replicas,
    )
