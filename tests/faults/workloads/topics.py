"""Plain topics: one message after another to a subscriber on another broker."""

from __future__ import annotations

from collections.abc import Callable

from muster.bus import api
from muster.core import errors
from tests.faults import deployment
from tests.faults.workloads import workload


class TopicWorkload(workload.Workload):
    name = "topics"
    guarantee = "subscribers receive again (messages during the fault may be lost)"
    measured = ("delivered",)

    async def start(self) -> None:
        for number in range(1, deployment.CLIENTS + 1):
            subscriber = await self.connect("user", number)
            publisher = await self.connect("publisher", number % deployment.CLIENTS + 1)
            topic, actor = f"topic.{self.tag}.{number}", f"subscriber-{number}"
            await subscriber.subscribe(topic, handler=self._recorder(actor))
            self.run(self._publish(publisher, topic))

    def _recorder(self, actor: str) -> Callable[[api.Message], None]:
        def record(_: api.Message) -> None:
            self.history.event(actor, "delivered")

        return record

    async def _publish(self, publisher: workload.Client, topic: str) -> None:
        async def publish() -> None:
            try:
                await publisher.publish(topic, b"x")
            except errors.Unavailable as error:
                self.history.event("publisher", "unpublished", error=str(error))

        await self.repeat(publish)
