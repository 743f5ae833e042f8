r"""Topics, in three equivalent notations.

A topic is a sequence of 1 to 16 levels, each of them any text at all.  It is written as

    a path      Course/CPS616/Session/HPJava
    tags        Course=CPS616,Session=HPJava          levels alternate: tag, value, tag, value
    a subject   topic.Course.CPS616.Session.HPJava    used by the broker for routing

and a subscription is a `Pattern`, written in the same three:

    Course/*/Session/>        ``*`` is one level, a last ``>`` is one level or more; other levels are literal
    Course=*,Session=HPJava   every topic with *at least* these tags, in any order
    Course=*;Session=HPJava   with semicolons: exactly these, in this order (the path Course/*/Session/HPJava)
    topic.Course.*.Session.>

**Which notation?** `parse` decides: the prefixes ``path:``, ``tags:`` and ``subject:`` name the notation;
otherwise text with an ``=`` is tags and all other text is a path.

**Order of tags.** Subjects are positional and sets of tags are not. Tags joined by commas are sorted by their
code points, so the same tags in different orders are the same topic; each tag may then occur only once. Tags
joined by semicolons keep their order: this notation is for paths whose tags are not sorted, or repeated. A
path of odd length ends with a tag that has no value (``Course=CPS616,Session``). Spaces after a separator are
not part of a tag. Only the first ``=`` of a pair separates: ``a=b=c`` is the tag ``a`` with the value
``b=c``.

**Escapes in paths and tags.** A backslash is an ordinary character, except in two places: before a separator
(``/`` in paths; ``,`` ``;`` ``=`` in tags) it makes that character part of the level, and at the start of a
level that would otherwise be a wildcard, it makes it the literal character (``\*``). A literal backslash in
these places is doubled. So every text is a path, and every topic has exactly one path.

**Subjects.** They begin with a separate token (`subjects.TOPIC_PREFIX`), so that no topic can be a subject of
Muster or of NATS, and permissions can be allow lists. The mapping of ``/``, ``.`` and empty levels is that of
the broker for MQTT, so that an MQTT client that publishes on ``topic/a//b.c`` and the topic ``a//b.c`` use
the same subject (``topic.a./.b//c``). Characters that are not valid in a token are percent-escaped. Unicode
is not normalised: topics are equal if their code points are.
"""

from __future__ import annotations

import abc
import enum
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from muster.core import errors, subjects

MAX_LEVELS = 16
# A protocol line of the broker has at most 4,096 bytes, and some of its subjects contain a user's subject:
# half is safe.
MAX_SUBJECT_BYTES = 2048
MAX_CHARACTERS = 2 * MAX_SUBJECT_BYTES  # of a topic in any notation


class Wildcard(enum.Enum):
    ONE = "*"
    REST = ">"


Level: TypeAlias = str | Wildcard

# -- subjects ----------------------------------------------------------------------------------------------

_ESCAPED = r"[01][0-9A-F]|20|7F|2A|3E|2F|2B|23|25"  # the codes of characters that may need an escape
_TO_ESCAPE = re.compile(rf"[\x00-\x20\x7f*>/+#]|%(?={_ESCAPED})")
_TO_UNESCAPE = re.compile(rf"//|%({_ESCAPED})")
_EMPTY_TOKEN = "/"


def _encode(level: str) -> str:
    """Encode a level as a subject token. ``+`` and ``#`` would be valid there, but not in an MQTT topic."""
    if not level:
        return _EMPTY_TOKEN
    return _TO_ESCAPE.sub(_percent, level).replace(".", "//")


def _percent(match: re.Match[str]) -> str:
    return f"%{ord(match[0]):02X}"


def _decode(token: str) -> str:
    if token == _EMPTY_TOKEN:
        return ""
    return _TO_UNESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else ".", token)


def _subject(levels: Sequence[Level]) -> str:
    """The subject of a topic or pattern; refused where it is too long for the broker."""
    tokens = (level.value if isinstance(level, Wildcard) else _encode(level) for level in levels)
    subject = ".".join((subjects.TOPIC_PREFIX, *tokens))
    try:
        size = len(subject.encode())
    except UnicodeEncodeError as error:
        raise errors.InvalidInput("a topic must be valid Unicode text, without lone surrogates") from error
    if size > MAX_SUBJECT_BYTES:
        raise errors.LimitExceeded(
            f"the topic needs a subject of {size} bytes; the most is {MAX_SUBJECT_BYTES}"
        )
    return subject


def _levels_of_subject(subject: str) -> Iterator[Level]:
    _bound(subject)
    prefix, *tokens = subject.split(".")
    if prefix != subjects.TOPIC_PREFIX:
        raise errors.InvalidInput(
            f"{subject[:100]!r} is no topic's subject: they begin with {subjects.TOPIC_PREFIX}."
        )
    for position, token in enumerate(tokens):
        if token == "*":
            yield Wildcard.ONE
        elif token == ">" and position == len(tokens) - 1:
            yield Wildcard.REST
        else:
            level = _decode(token)
            if _encode(level) != token:
                raise errors.InvalidInput(
                    f"{subject[:100]!r} is no topic's subject: {token[:40]!r} is misescaped"
                )
            yield level


# -- paths and tags: separators, escapes, wildcards --------------------------------------------------------


def _bound(text: str) -> None:
    """Reject text that is too long for a topic, and what is not text, before it is parsed."""
    if not isinstance(text, str):
        raise errors.InvalidInput(f"a topic is text, not {type(text).__name__}")
    if len(text) > MAX_CHARACTERS:
        raise errors.LimitExceeded(
            f"a topic of {len(text)} characters is too long: its subject may have {MAX_SUBJECT_BYTES} bytes"
        )


def _split(text: str, separators: str) -> Iterator[tuple[str, str]]:
    """The pieces of ``text``, each with the separator after it; an odd run of ``\\`` before one undoes it."""
    _bound(text)
    piece, at = "", 0
    for match in re.finditer(rf"(?<!\\)(\\*)([{separators}])", text):
        piece += text[at : match.start()] + "\\" * (len(match[1]) // 2)
        at = match.end()
        if len(match[1]) % 2:
            piece += match[2]
        else:
            yield piece, match[2]
            piece = ""
    yield piece + text[at:], ""


def _protect(level: str, separators: str, *, last: bool) -> str:
    """The reverse of `_split` for one level; what follows it, unless it is the last, is a separator."""
    text = re.sub(rf"(?<!\\)(\\*)([{separators}])", r"\1\1\\\2", level)
    return text if last else re.sub(r"(\\+)\Z", r"\1\1", text)


def _read_level(text: str, wildcards: str) -> Level:
    if len(text) == 1 and text in wildcards:
        return Wildcard(text)
    if text[:1] == "\\" and text.lstrip("\\") in tuple(wildcards):
        return text[1:]
    return text


def _write_level(level: Level, wildcards: str) -> str:
    if isinstance(level, Wildcard):
        return level.value
    return "\\" + level if level.lstrip("\\") in tuple(wildcards) else level


_PATH_WILDCARDS = "*>"
_TAG_WILDCARDS = "*"


def _levels_of_path(path: str) -> list[Level]:
    return [_read_level(piece, _PATH_WILDCARDS) for piece, _ in _split(path, "/")]


def _path(levels: Sequence[Level]) -> str:
    last = len(levels) - 1
    return "/".join(
        _protect(_write_level(level, _PATH_WILDCARDS), "/", last=position == last)
        for position, level in enumerate(levels)
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    tag: Level
    value: Level | None  # None: a tag without a value

    def write(self, *, last: bool) -> str:
        tag = _write_level(self.tag, _TAG_WILDCARDS)
        if tag.lstrip("\\").startswith(" "):
            tag = "\\" + tag
        if self.value is None:
            return _protect(tag, ",;=", last=last)
        value = _write_level(self.value, _TAG_WILDCARDS)
        return f"{_protect(tag, ',;=', last=False)}={_protect(value, ',;=', last=last)}"


def _pairs_of_text(text: str) -> tuple[list[_Pair], str]:
    """The pairs of tag notation as written, and what joins them (empty where there is but one)."""
    pairs: list[_Pair] = []
    joint = value_start = ""
    tag: str | None = None
    for piece, separator in _split(text, ",;="):
        if separator == "=":
            if tag is None:
                tag = piece
            else:
                value_start += f"{piece}="
            continue
        if separator:
            if joint and separator != joint:
                raise errors.InvalidInput(f"{text[:100]!r}: join tags by commas or by semicolons, not both")
            joint = separator
        if value_start:
            piece, value_start = value_start + piece, ""
        name, value = (piece, None) if tag is None else (tag, _read_level(piece, _TAG_WILDCARDS))
        name = name.lstrip(" ")
        if name[:1] == "\\" and name.lstrip("\\").startswith(" "):
            name = name[1:]
        pairs.append(_Pair(_read_level(name, _TAG_WILDCARDS), value))
        tag = None
    return pairs, joint


def _pairs(levels: Sequence[Level]) -> list[_Pair]:
    return [
        _Pair(levels[at], levels[at + 1] if at + 1 < len(levels) else None) for at in range(0, len(levels), 2)
    ]


def _write_pairs(pairs: Sequence[_Pair], joint: str) -> str:
    return joint.join(pair.write(last=position == len(pairs) - 1) for position, pair in enumerate(pairs))


def _in_order(pairs: Sequence[_Pair]) -> bool:
    tags = [pair.tag for pair in pairs if pair.value is not None]
    return all(str(tag) < str(after) for tag, after in itertools.pairwise(tags))


_NOTATION = re.compile(r"(path|tags|subject):")


def _notation(text: str) -> tuple[str, str]:
    _bound(text)
    if match := _NOTATION.match(text):
        return match[1], text[match.end() :]
    return ("tags" if "=" in text else "path"), text


def has_notation(text: str) -> bool:
    """Whether the text states its notation: ``path:``, ``tags:`` or ``subject:``."""
    return _NOTATION.match(text) is not None


def _named(path: str) -> str:
    """``path`` in a form that `_notation` recognises as a path."""
    return f"path:{path}" if "=" in path or _NOTATION.match(path) else path


# -- topics ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Topic:
    """The destination of a message: levels without wildcards."""

    levels: tuple[str, ...]
    subject: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.levels)
        object.__setattr__(self, "subject", _subject(self.levels))

    @classmethod
    def parse(cls, text: str) -> Topic:
        notation, rest = _notation(text)
        return {"path": cls.from_path, "tags": cls.from_tags, "subject": cls.from_subject}[notation](rest)

    @classmethod
    def from_path(cls, path: str) -> Topic:
        return cls(_without_wildcards(_levels_of_path(path)))

    @classmethod
    def from_tags(cls, tags: str) -> Topic:
        pairs, joint = _pairs_of_text(tags)
        for pair in pairs[:-1]:
            if pair.value is None:
                raise errors.InvalidInput(
                    f"{tags[:100]!r}: the tag {pair.tag!r} has no value; only the last may"
                )
        if joint == ",":
            valueless = pairs[-1:] if pairs[-1].value is None else []
            pairs = sorted(pairs[: len(pairs) - len(valueless)], key=lambda pair: str(pair.tag)) + valueless
            if not _in_order(pairs):
                raise errors.InvalidInput(
                    f"{tags[:100]!r}: a tag occurs twice; join by semicolons if that is intended"
                )
        return cls(_without_wildcards(_flat(pairs)))

    @classmethod
    def from_subject(cls, subject: str) -> Topic:
        return cls(_without_wildcards(list(_levels_of_subject(subject))))

    @property
    def path(self) -> str:
        return _path(self.levels)

    @property
    def tags(self) -> str:
        pairs = _pairs(self.levels)
        return _write_pairs(pairs, "," if _in_order(pairs) else ";")

    def __str__(self) -> str:
        return _named(self.path)


def _flat(pairs: Sequence[_Pair]) -> list[Level]:
    return [level for pair in pairs for level in (pair.tag, pair.value) if level is not None]


def _check(levels: Sequence[Level]) -> None:
    if len(levels) > MAX_LEVELS:
        raise errors.LimitExceeded(f"a topic of {len(levels)} levels is too deep: the most is {MAX_LEVELS}")
    if not levels or (len(levels) == 1 and not levels[0]):
        raise errors.InvalidInput("a topic needs a name")


def _without_wildcards(levels: Sequence[Level]) -> tuple[str, ...]:
    plain = tuple(level for level in levels if isinstance(level, str))
    if len(plain) != len(levels):
        raise errors.InvalidInput(
            "a topic to publish on has no wildcards",
            hint="write \\* or \\> for a level that is that character",
        )
    return plain


# -- patterns ----------------------------------------------------------------------------------------------


class TopicPattern(abc.ABC):
    """The subjects of a subscription, and the exact test of received messages.

    ``subjects`` together match everything that the pattern matches, and sometimes more; two of them may
    deliver the same message. `take` is the test for both: it accepts a message from exactly one of the
    subscriptions.
    """

    @property
    @abc.abstractmethod
    def subjects(self) -> tuple[str, ...]: ...

    @abc.abstractmethod
    def matches(self, topic: Topic) -> bool: ...

    def take(self, subject: str, via: int = 0) -> Topic | None:
        """The topic of a message that arrived by the subscription to ``subjects[via]``, if it is to be
        delivered.

        None: it does not match, is not a topic of a user, or an earlier one of the subscriptions delivers it.
        """
        try:
            topic = Topic.from_subject(subject)
        except errors.MusterError:
            return None
        if not self.matches(topic):
            return None
        return None if any(subjects.matches(other, subject) for other in self.subjects[:via]) else topic

    def permitted(self) -> tuple[str, ...]:
        """The subjects of a permission for what matches and nothing else; refused where none express it."""
        return self.subjects

    @property
    def cover(self) -> str:
        """One subject that covers all others: for readers of a stream, whose filters may not overlap."""
        return self.subjects[0] if len(self.subjects) == 1 else f"{subjects.TOPIC_PREFIX}.>"

    @staticmethod
    def parse(text: str) -> TopicPattern:
        notation, rest = _notation(text)
        read = {
            "path": TopicPattern.from_path,
            "tags": TopicPattern.from_tags,
            "subject": TopicPattern.from_subject,
        }
        return read[notation](rest)

    @staticmethod
    def from_path(path: str) -> TopicPattern:
        return PathPattern(tuple(_levels_of_path(path)))

    @staticmethod
    def from_tags(tags: str) -> TopicPattern:
        pairs, joint = _pairs_of_text(tags)
        if joint != ";":
            return TagPattern(frozenset(pairs))
        if any(pair.value is None for pair in pairs[:-1]):
            raise errors.InvalidInput(f"{tags[:100]!r}: only the last tag may be without a value")
        return PathPattern(tuple(_flat(pairs)))

    @staticmethod
    def from_subject(subject: str) -> TopicPattern:
        return PathPattern(tuple(_levels_of_subject(subject)))


@dataclass(frozen=True)
class PathPattern(TopicPattern):
    """Levels in their places: one subject, and the broker's test is already exact."""

    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        _check(self.levels)
        if Wildcard.REST in self.levels[:-1]:
            raise errors.InvalidInput("> matches all further levels, so it must be the last one")
        _ = self.subjects  # refuses one that is too long now, not when it is used

    @functools.cached_property
    def subjects(self) -> tuple[str, ...]:
        return (_subject(self.levels),)

    def matches(self, topic: Topic) -> bool:
        pattern_levels, levels = self.levels, topic.levels
        if pattern_levels[-1] is Wildcard.REST:
            pattern_levels = pattern_levels[:-1]
            if len(levels) <= len(pattern_levels):
                return False
        elif len(levels) != len(pattern_levels):
            return False
        return all(w is Wildcard.ONE or w == g for w, g in zip(pattern_levels, levels, strict=False))

    def __str__(self) -> str:
        return _named(_path(self.levels))


@dataclass(frozen=True)
class TagPattern(TopicPattern):
    """Matches topics with at least these tags, at any position.

    A broker cannot match a tag at any position, so the pattern subscribes to one of its tags at each possible
    position (at most 16 subjects), and checks the others when a message arrives.
    """

    pairs: frozenset[_Pair]

    def __post_init__(self) -> None:
        if any(isinstance(pair.tag, Wildcard) for pair in self.pairs):
            raise errors.InvalidInput("only a value can be a wildcard; write \\* for a tag so named")
        _check(_flat(list(self.pairs)))
        _ = self.subjects

    @functools.cached_property
    def subjects(self) -> tuple[str, ...]:
        # A tag with a value is the rarest in most messages, so the broker can drop the most.
        anchor = min(self._sorted(), key=lambda pair: not isinstance(pair.value, str))
        selected = list[Sequence[Level]]()
        for place in range(0, MAX_LEVELS, 2):
            levels = [Wildcard.ONE] * place + [anchor.tag] + ([] if anchor.value is None else [anchor.value])
            selected.append(levels)
            if len(levels) < MAX_LEVELS:
                selected.append([*levels, Wildcard.REST])
        return tuple(map(_subject, selected))

    def permitted(self) -> tuple[str, ...]:
        if len(self.pairs) > 1:  # the subjects name one of the tags only
            raise errors.InvalidInput(
                f"{str(self)[:140]!r} cannot be a permission: subjects cannot name several tags in any order",
                hint="name one tag, or join the tags by semicolons: exactly these, in this order",
            )
        return self.subjects

    def _sorted(self) -> list[_Pair]:
        return sorted(self.pairs, key=lambda pair: pair.write(last=True))

    def matches(self, topic: Topic) -> bool:
        pairs = _pairs(topic.levels)
        return all(any(_has(pattern_pair, pair) for pair in pairs) for pattern_pair in self.pairs)

    def __str__(self) -> str:
        return f"tags:{_write_pairs(self._sorted(), ',')}"


def _has(pattern_pair: _Pair, pair: _Pair) -> bool:
    """A tag without a value in the pattern matches any value, or none."""
    if pattern_pair.tag != pair.tag:
        return False
    if pattern_pair.value is Wildcard.ONE:
        return pair.value is not None
    return pattern_pair.value in (None, pair.value)
