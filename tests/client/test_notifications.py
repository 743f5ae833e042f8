"""`m.notify` over a bus that fails for a moment."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from muster.client import notifications
from muster.core import errors


class FailingBus:
    """The first subscription is not confirmed in time; all others are."""

    identity = "shop"

    def __init__(self) -> None:
        self.subscribed = 0

    async def subscribe(self, subject: str, *, handler: Any) -> FailingBus:
        self.subscribed += 1
        await asyncio.sleep(0)
        if self.subscribed == 1:
            raise errors.TimedOut("the broker did not confirm the subscription")
        return self

    async def close(self) -> None:
        self.subscribed -= 1


async def test_a_receiver_after_a_failed_subscription_is_subscribed() -> None:
    bus = FailingBus()
    async with contextlib.AsyncExitStack() as stack:
        notify = notifications.AsyncNotify(bus, stack)  # type: ignore[arg-type]
        with pytest.raises(errors.TimedOut):
            await notify._client()
        opened = await asyncio.gather(notify._client(), notify._client())
        assert opened[0] is opened[1]
        assert opened[0]._subscription is not None
        assert bus.subscribed == 2
