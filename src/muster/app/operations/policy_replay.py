"""Evaluates a notification policy on past notifications with the pipeline's Spark.

The two services are independent: the models come from the notifiers, which also validate the policy, and go
to Spark as plain types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.analyses import policy_replay
from muster.bus import api
from muster.core import errors
from muster.notify import authorities, models, protocol, queries


async def load_vocabulary(bus: api.Bus) -> models.Vocabulary:
    """The models of the domain. `errors.NotFound` if no notifications were stored."""
    vocabulary = models.Vocabulary()
    for definition in await queries.list_models(bus):
        vocabulary.add(authorities.model_of(definition))
    try:
        await bus.open_stream(protocol.STREAM_HISTORY)
    except errors.NotFound:
        raise errors.NotFound("no notifications are stored yet", hint="notifiers store them") from None
    return vocabulary


def replay_notifications(
    spark: Any,  # a session of `pipeline.session`
    access: Mapping[str, str],
    vocabulary: models.Vocabulary,
    policy: str,
    *,
    address: str | None = None,
    from_ms: int | None = None,
) -> policy_replay.PolicyReplay:
    """The receivers to which this policy would have admitted past notifications. Blocks."""
    vocabulary.policy(policy)
    if address is not None:
        vocabulary.address(address)
    replay_models = policy_replay.ReplayModels(
        {model.name: model.attributes for model in vocabulary.receivers.values()},
        {model.name: model.attributes for model in vocabulary.events.values()},
    )
    return policy_replay.replay(
        spark, access, protocol.STREAM_HISTORY, replay_models, policy, address=address, from_ms=from_ms
    )
