"""A short summary of what a notifier holds, so that an event is not forwarded where it cannot match.

A notifier is excluded if no policy there accepts the event's type, or if no receiver there has the word that
the address requires.  A summary may be too wide but never too narrow: before a change that widens it is
acknowledged, every other notifier has confirmed it (`muster.notify.notifier.shards.members`).  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from muster.notify import models, protocol
from muster.notify.matcher import matcher, receiver_columns
from muster.predicates import ast, types
from muster.predicates.analysis import normal_forms

Words = Mapping[str, tuple[str, ...]]

CHARACTERS_MAX = 64 << 10  # of words, and of event types: a summary has to fit into a message


def summary_words(held: matcher.Matcher) -> dict[str, tuple[str, ...]]:
    """Return all values of each string attribute that has few values in every model, as far as they fit.

    Restricted attributes are left out: a grant begins and ends without a change of a receiver.
    """
    values: dict[str, set[str]] = {}
    unknown: set[str] = set()
    for table in held.tables:
        for name, column in table.columns.items():
            if models.restricted(name):
                continue
            is_string = (
                isinstance(column, receiver_columns.WordColumn) and column.kind is types.ValueKind.STRING
            )
            words = (
                column.words_held() if isinstance(column, receiver_columns.WordColumn) and is_string else None
            )
            if words is None:
                unknown.add(name)
            else:
                values.setdefault(name, set()).update(words)
    listed: dict[str, tuple[str, ...]] = {}
    size = 0
    for name in sorted(values.keys() - unknown, key=lambda name: (_size(values[name]), name)):
        size += _size(values[name])
        if size > CHARACTERS_MAX:
            break
        listed[name] = tuple(sorted(values[name]))
    return listed


def summary_accepts(held: matcher.Matcher) -> tuple[str, ...] | None:
    """Return the event types of which an event needs one; None: any, or too many to list."""
    accepts = held.policies.accepts()
    return None if accepts is None or _size(accepts) > CHARACTERS_MAX else tuple(sorted(accepts))


def _size(words: Iterable[str]) -> int:
    return sum(map(len, words))


def is_wider(held: matcher.Matcher, summary: protocol.ShardSummary | None) -> bool:
    """Whether the matcher has more now than the summary."""
    if summary is None:
        return True
    accepts = summary_accepts(held)
    if summary.accepts is not None and (accepts is None or not set(accepts) <= set(summary.accepts)):
        return True
    now = summary_words(held)
    return any(name not in now or not set(now[name]) <= set(words) for name, words in summary.words.items())


def may_match(
    summary: protocol.ShardSummary, attributes: Mapping[str, types.Value], address: ast.Condition
) -> bool:
    if not summary.shards:
        return False
    if summary.accepts is not None and not any(attributes.get(name) is True for name in summary.accepts):
        return False
    condition = normal_forms.negation_normal(address)
    parts = condition.operands if isinstance(condition, ast.And) else (condition,)
    return not any(_absent(part, summary.words) for part in parts)


def _absent(part: ast.Condition, words: Words) -> bool:
    """Whether a clause requires words that no receiver there has."""
    match part:
        case ast.Comparison(operator="=", left=ast.Name() as name, right=ast.Literal(value=str() as word)):
            return name.key in words and word not in words[name.key]
        case ast.In():
            return part.name.key in words and not set(part.words) & set(words[part.name.key])
    return False
