"""Accepts requests: `accept` determines the sender and the operation, and checks the reply subject.

The sender is the identity in the subject, which the broker enforces.  Two kinds of messages are refused,
and counted by their reason:

- ``reply``: the reply subject is missing, or is not in the sender's own reply space
  (`muster.core.subjects`): the service would publish there with its own permissions;
- ``subject``: it does not match the subscribed pattern: a consumer delivered it.

Messages that a stream sent, whose subject does not prove the sender, are refused by the connection
(`muster.bus.client.parser`). Then the service decides whether it admits the message (``admit``, see
`muster.bus.rpc.admission`).

It costs a few dictionary look-ups for each message, so that it is suitable for data paths.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping

from muster.bus import api
from muster.core import subjects

ON_BEHALF_OF = "Muster-On-Behalf-Of"  # a header: the user for whom the sender acts, as a claim of the sender
# a header: requests with the same id are the same request, which is executed once
REQUEST_ID = "Muster-Request"

_refusals: Counter[tuple[str, ...]] = Counter()


class RpcCaller:
    """An accepted request: its sender and its operation."""

    __slots__ = ("identity", "message", "operation")

    def __init__(self, identity: str, operation: str, message: api.Message) -> None:
        self.identity = identity
        self.operation = operation  # all of the subject after the sender: "request.apply"
        self.message = message

    @property
    def on_behalf_of(self) -> str:
        """A claim of the sender; valid only for senders that may act for others."""
        return (self.message.header(ON_BEHALF_OF) or "")[:256]

    @property
    def request_id(self) -> str:
        return (self.message.header(REQUEST_ID) or "")[:128]

    def __repr__(self) -> str:
        return f"<{self.operation} of {self.identity}>"


def accept(
    message: api.Message,
    pattern: str,
    refused: Counter[str],
    *,
    needs_reply: bool = True,
    admit: Callable[[str, api.Message], bool] | None = None,
) -> RpcCaller | None:
    """The request on a subscription to ``pattern`` (``muster.<part>.from.*.…``); None if it is not one, which
    is counted in ``refused``, or not admitted.  Without ``needs_reply`` the sender need not name a reply
    subject."""
    parsed = _parse(pattern, message.subject)
    if parsed is None:
        reason = "subject"
    elif needs_reply if message.reply is None else not message.reply.startswith(parsed[2]):
        reason = "reply"
    elif admit is not None and not admit(parsed[0], message):
        return None
    else:
        return RpcCaller(parsed[0], parsed[1], message)
    count_refusal(pattern.split(".", 2)[1], reason, refused)
    return None


def count_refusal(part: str, reason: str, refused: Counter[str] | None = None) -> None:
    """``refused``: the counts of the caller, beside those of the process."""
    if refused is not None:
        refused[reason] += 1
    _refusals[part, reason] += 1


def refusals() -> Mapping[tuple[str, ...], int]:
    """Messages that this process refused, by service and reason."""
    return _refusals


def sender_of(pattern: str, subject: str) -> str:
    """The sender of a message on a subscription to ``pattern``; empty if it is not a request."""
    parsed = _parse(pattern, subject)
    return "" if parsed is None else parsed[0]


@functools.lru_cache(maxsize=8192)
def _parse(pattern: str, subject: str) -> tuple[str, str, str] | None:
    if not subjects.matches(pattern, subject):
        return None
    _, _, _, sender, operation = subject.split(".", 4)
    return sender, operation, subjects.reply_prefix(subject)
