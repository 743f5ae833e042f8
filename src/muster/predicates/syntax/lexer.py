"""Text into tokens, each with its place.

Names follow Java's rule for identifiers (letters, digits, ``_``, ``$`` and the equivalents in all scripts)
and are case-sensitive; reserved words are not. Numbers follow Java's literals, as the JMS specification
requires: ``0x1F``, ``017`` (octal), ``5L``, ``7.``, ``.5``, ``7E3``, ``2d``, and ``1.5f``, which is rounded
to 32 bits.
"""

from __future__ import annotations

import re
import struct
import unicodedata
from typing import Final, NamedTuple

from muster.core import errors
from muster.predicates import types

RESERVED: Final = frozenset(
    ("NULL", "TRUE", "FALSE", "NOT", "AND", "OR", "BETWEEN", "LIKE", "IN", "IS", "ESCAPE")
)

_TOKEN: Final = re.compile(
    r"""
    [ \t\f\r\n]*
    (?:
      (?P<word>   (?:[A-Za-z_$]|[^\x00-\x7f]) (?:[A-Za-z0-9_$\x00-\x08\x0e-\x1b\x7f]|[^\x00-\x7f])* )
    | (?P<approx> (?: (?:[0-9]+\.[0-9]*|\.[0-9]+) (?:[eE][+-]?[0-9]+)? | [0-9]+[eE][+-]?[0-9]+ ) [fFdD]?
                | [0-9]+[fFdD] )
    | (?P<exact>  (?: 0[xX][0-9a-fA-F]+ | [0-9]+ ) [lL]? )
    | (?P<string> '[^']*(?:''[^']*)*' | "[^"]*(?:""[^"]*)*" )
    | (?P<symbol> <> | <= | >= | == | != | [-+*/=<>(){},:.] )
    | (?P<end>    \Z )
    )
    """,
    re.VERBOSE,
)
_START: Final = frozenset(["Lu", "Ll", "Lt", "Lm", "Lo", "Nl", "Sc", "Pc"])
_PART: Final = _START | frozenset(["Nd", "Mc", "Mn", "Cf"])

_SYNONYMS: Final = {"==": "=", "!=": "<>"}
_EXTENSIONS: Final = {**_SYNONYMS, "{": "(", "}": ")", ":": "", ".": ""}

_HINTS: Final = {
    "&": "write AND",
    "|": "write OR",
    "!": "write NOT, or <> for unequal",
    "'": "close the string with another '; write '' for a ' inside it",
    '"': 'close the string with another "; write "" for a " inside it',
    "‘": "strings have straight quotes: 'text'",
    "’": "strings have straight quotes: 'text'",
    "“": "strings have straight quotes: 'text'",
    "”": "strings have straight quotes: 'text'",
    "[": "group with parentheses",
    "]": "group with parentheses",
    ";": "an expression is a single condition without an end mark",
    "%": "there is no remainder operator; % is a wildcard inside the string of LIKE",
}


class Token(NamedTuple):
    """``kind`` is word, reserved, number, string, symbol or end; ``value`` is the value of the token."""

    kind: str
    value: str | int | float
    start: int
    end: int


def tokens(text: str, *, strict: bool) -> list[Token]:
    _refuse_half_characters(text)
    tokens_: list[Token] = []
    position, match = 0, _TOKEN.match
    while True:
        here = match(text, position)
        if here is None:
            raise _unexpected(text, position)
        kind = here.lastgroup
        assert kind is not None
        start, position = here.span(kind)
        raw = here[kind]
        if kind == "word":
            tokens_.append(_word(text, raw, start, position))
        elif kind == "symbol":
            if strict:
                _refuse_extension(text, raw, start)
            tokens_.append(Token("symbol", _SYNONYMS.get(raw, raw), start, position))
        elif kind == "string":
            tokens_.append(Token("string", _string(text, raw, start, strict=strict), start, position))
        elif kind == "end":
            tokens_.append(Token("end", "", start, start))
            return tokens_
        else:
            following = text[position : position + 1]
            if following.isalnum() or (following and following in "_$."):
                raise errors.ParseError(
                    f"{text[start : position + 1][:40]!r} is neither a number nor a name",
                    text=text,
                    position=position,
                    hint="names begin with a letter; numbers are written like 5, 0x1F, 017, 5L, 7.5, 7E3",
                )
            number = _exact(text, raw, start) if kind == "exact" else _approximate(text, raw, start)
            tokens_.append(Token("number", number, start, position))


def _word(text: str, raw: str, start: int, end: int) -> Token:
    if raw.isascii():
        if (upper := raw.upper()) in RESERVED:
            return Token("reserved", upper, start, end)
    else:
        _check_name(text, raw, start)
    return Token("word", raw, start, end)


def _string(text: str, raw: str, start: int, *, strict: bool) -> str:
    quote = raw[0]
    if strict and quote == '"':
        raise errors.ParseError(
            "double quotes are not part of strict selectors",
            text=text,
            position=start,
            hint="strings have single quotes: 'text'",
        )
    return raw[1:-1].replace(quote * 2, quote)


def _refuse_extension(text: str, raw: str, start: int) -> None:
    if raw in _EXTENSIONS:
        plain = _EXTENSIONS[raw]
        raise errors.ParseError(
            f"{raw!r} is not part of strict selectors",
            text=text,
            position=start,
            hint=f"write {plain}" if plain else "in selectors names are single words without scopes",
        )


def _exact(text: str, raw: str, start: int) -> int:
    digits = raw.rstrip("lL")
    if len(digits) > 32:
        raise _too_large(text, start)
    if digits[:2] in ("0x", "0X"):
        number = int(digits, 16)
    elif digits[0] == "0" and len(digits) > 1:
        if not set(digits) <= set("01234567"):
            raise errors.ParseError(
                f"{digits!r} begins with 0 and so is octal, but has a digit above 7",
                text=text,
                position=start,
                hint="drop the leading zeros for a decimal number",
            )
        number = int(digits, 8)
    else:
        number = int(digits)
    # 2^63 itself is accepted here: the parser accepts it only after a minus.
    if number > types.INT_MAX + 1:
        raise _too_large(text, start)
    return number


def _approximate(text: str, raw: str, start: int) -> float:
    digits = raw.rstrip("fFdD")
    number = float(digits)
    if raw[-1] in "fF":
        try:
            (number,) = struct.unpack("f", struct.pack("f", number))
        except OverflowError:
            number = float("inf")
    if number == float("inf"):
        raise errors.ParseError(
            f"{raw[:40]} is beyond the largest floating-point number",
            text=text,
            position=start,
            hint="use a number below 1.8E308 (3.4E38 with the suffix f)",
        )
    return number


def _too_large(text: str, start: int) -> errors.ParseError:
    return errors.ParseError(
        "integers range from -9223372036854775808 to 9223372036854775807",
        text=text,
        position=start,
        hint="write a larger one with a decimal point, as an approximate number",
    )


def too_large(text: str, token: Token) -> errors.ParseError:
    return _too_large(text, token.start)


def _check_name(text: str, raw: str, start: int) -> None:
    for offset, character in enumerate(raw):
        if character.isascii():
            continue  # the pattern excludes those
        if unicodedata.category(character) not in (_PART if offset else _START):
            raise _unexpected(text, start + offset)


def _unexpected(text: str, position: int) -> errors.ParseError:
    while text[position] in " \t\f\r\n":
        position += 1
    character = text[position]
    what = "this string is never closed" if character in "'\"" else f"unexpected character {character!r}"
    return errors.ParseError(what, text=text, position=position, hint=_HINTS.get(character))


def _refuse_half_characters(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.ParseError(
            f"{text[error.start]!r} is half of a surrogate pair, not a character",
            text=text,
            position=error.start,
            hint="decode the text from UTF-8 before parsing it",
        ) from None
