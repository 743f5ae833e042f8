"""A notification policy over the past: what notifiers kept, asked by the pipeline's Spark.

The two are independent: the models of receivers and events come from the notifiers, which also check
the policy, and go to Spark as plain types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from muster.bus import api
from muster.core import errors
from muster.notify import authorities, models, protocol, queries
from muster.pipeline.batch import policy_replay


async def load_vocabulary(bus: api.Bus) -> models.Vocabulary:
    """The models of the domain. `errors.NotFound` where nobody has ever notified anybody."""
    found = models.Vocabulary()
    for one in await queries.defined(bus):
        found.add(authorities.model_of(msgspec.convert(one, protocol.DefineModel)))
    try:
        await bus.open_stream(protocol.STREAM_HISTORY)
    except errors.NotFound:
        raise errors.NotFound("no notifications were kept yet", hint="notifiers keep them") from None
    return found


def replay_notifications(
    spark: Any,  # a session of `pipeline.session`
    access: Mapping[str, str],
    words: models.Vocabulary,
    policy: str,
    *,
    address: str | None = None,
    from_ms: int | None = None,
) -> policy_replay.PolicyReplay:
    """Whom this policy would have let the past's notifications through to. Blocks."""
    words.policy(policy)
    if address is not None:
        words.address(address)
    told = policy_replay.ReplayModels(
        {model.name: model.attributes for model in words.receivers.values()},
        {model.name: model.attributes for model in words.events.values()},
    )
    return policy_replay.replay(
        spark, access, protocol.STREAM_HISTORY, told, policy, address=address, from_ms=from_ms
    )
