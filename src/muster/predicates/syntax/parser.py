"""Text into the tree.

An operator-precedence parser with its own stacks: it does not recurse, so no text can reach Python's
recursion limit. It alternates between two states, "operand expected" and "operator expected", and every error
names the state and the valid tokens.

*Strict* is the grammar of JMS message selectors and nothing else; as for other JMS providers, a name alone is
a condition where one is needed (``alert`` is ``alert = TRUE``).  *Extended*, the default, adds

    ==  !=                       the same as  =  <>
    "northwest"                  the same as  'northwest'
    services CONTAINS 'cgi'      whether a set holds a word
    sender.entity                an attribute of the sender instead of the subject
    sender: ( a = 1 AND b = 2 )  the bare names in this group are the sender's
    { … }                        the same as ( … )

and reserves no further word: an attribute may be called ``contains`` or ``sender``.

Bare names are those of the subject: the message, the event, the receiver. If the subject has its own scope,
``home`` names it, and then ``event.x`` and ``x`` are the same name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final, cast

from muster.core import errors
from muster.predicates import ast, like_patterns, limits, types
from muster.predicates.syntax import lexer, operand_stack

SCOPES: Final = ("sender", "receiver", "event")

_INFIX: Final = {
    "+": operand_stack.SUM,
    "-": operand_stack.SUM,
    "*": operand_stack.PRODUCT,
    "/": operand_stack.PRODUCT,
}
# The only header fields that a selector may name; JMSX… and JMS_… are properties.
_HEADERS: Final = frozenset(
    ["JMSDeliveryMode", "JMSPriority", "JMSMessageID", "JMSTimestamp", "JMSCorrelationID", "JMSType"]
)


def parse(
    text: str,
    *,
    strict: bool = False,
    home: str | None = None,
    scopes: Iterable[str] = SCOPES,
    bounds: limits.PredicateLimits = limits.DEFAULT,
) -> ast.Condition:
    """Parse ``text``; `errors.ParseError` or `errors.LimitExceeded` if it is not a valid condition.

    A blank strict selector is TRUE: to JMS, it is no selector at all.
    """
    if not isinstance(text, str):
        raise errors.InvalidInput(f"an expression is text, not {type(text).__name__}")
    if len(text) > bounds.text_length:
        raise errors.LimitExceeded(
            f"the expression has {len(text):,} characters, and at most {bounds.text_length:,} are allowed",
            hint="split it, or compare with fewer values",
        )
    tokens = lexer.tokens(text, strict=strict)
    if len(tokens) == 1:
        if strict:
            return ast.Constant(True)
        raise errors.ParseError(
            "the expression is empty", text=text, position=0, hint="TRUE is the condition that always holds"
        )
    return _Parser(text, tokens, strict=strict, home=home, scopes=tuple(scopes), bounds=bounds).run()


class _Parser:
    def __init__(
        self,
        text: str,
        tokens: list[lexer.Token],
        *,
        strict: bool,
        home: str | None,
        scopes: tuple[str, ...],
        bounds: limits.PredicateLimits,
    ) -> None:
        self._stack = operand_stack.OperandStack(text, bounds=bounds)
        self._text = text
        self._strict = strict
        self._tokens = tokens
        self._next = 0
        self._home = home
        self._scopes = scopes
        self._gaps_length = 0  # of its LIKE patterns

    def run(self) -> ast.Condition:
        while True:
            while not self._operand():
                pass
            while not self._operator():
                if self._tokens[self._next].kind == "end":
                    return self._stack.finish()

    # Reading

    def _take(self) -> lexer.Token:
        token = self._tokens[self._next]
        self._next += 1
        return token

    def _is(self, kind: str, value: str) -> bool:
        token = self._tokens[self._next]
        return token.kind == kind and token.value == value

    def _shown(self, token: lexer.Token) -> str:
        return repr(self._text[token.start : token.end][:40]) if token.kind != "end" else "the end"

    def _expect_string(self, after: str) -> lexer.Token:
        token = self._take()
        if token.kind != "string":
            self._stack.fail(
                f"{after} needs a string, not {self._shown(token)}", token.start, f"write {after} 'text'"
            )
        return token

    # An operand?

    def _operand(self) -> bool:
        """Process one token where an operand is expected; True if it completed one."""
        token = self._take()
        if token.kind == "word":
            return self._word(token)
        match token.kind, token.value:
            case "number", value:
                self._number(cast("int | float", value), token, token.start)
            case "string", value:
                self._stack.push(ast.Literal(value, (token.start, token.end)))
            case "reserved", "TRUE" | "FALSE":
                self._stack.push(ast.Literal(token.value == "TRUE", (token.start, token.end)))
            case "reserved", "NOT":
                if self._stack.operators and self._stack.operators[-1].precedence >= operand_stack.COMPARISON:
                    self._stack.fail(
                        "NOT negates a condition, but a value is expected here",
                        token.start,
                        "put NOT in front of the complete comparison",
                    )
                self._stack.push_operator("NOT", operand_stack.NOT, token.start)
                return False
            case "reserved", "NULL":
                self._stack.fail(
                    "NULL is not a value to compare with", token.start, "write x IS NULL or x IS NOT NULL"
                )
            case "symbol", "(" | "{":
                self._stack.open_group(cast(str, token.value), token.start, self._stack.scope)
                return False
            case "symbol", "+" | "-":
                number = self._tokens[self._next]
                if number.kind == "number":
                    self._next += 1
                    value = cast("int | float", number.value)
                    self._number(-value if token.value == "-" else value, number, token.start)
                else:
                    self._stack.push_operator(cast(str, token.value), operand_stack.SIGN, token.start)
                    return False
            case _:
                self._stack.fail(
                    f"expected a name, a value or a condition, not {self._shown(token)}",
                    token.start,
                    "for example: threat_level >= 4",
                )
        return True

    def _number(self, value: int | float, token: lexer.Token, start: int) -> None:
        if value.__class__ is int and value > types.INT_MAX:
            raise lexer.too_large(self._text, token)
        self._stack.push(ast.Literal(value, (start, token.end)))

    def _word(self, token: lexer.Token) -> bool:
        word = cast(str, token.value)
        following = self._tokens[self._next]
        if following.kind != "symbol":
            pass
        elif following.value == ":":
            colon = self._take()
            self._check_scope(word, token)
            opening = self._take()
            if opening.value not in operand_stack.CLOSING or opening.kind != "symbol":
                self._stack.fail(
                    f"expected a group after '{word}:', not {self._shown(opening)}",
                    opening.start if opening.kind != "end" else colon.start,
                    f"write {word}: ( … )",
                )
            self._stack.open_group(opening.value, token.start, word, named=True)
            return False
        elif following.value == ".":
            dot, name = self._take(), self._take()
            if name.kind not in ("word", "reserved") or token.end != dot.start or dot.end != name.start:
                self._stack.fail(
                    f"expected an attribute name directly after '{word}.'", dot.end, f"write {word}.name"
                )
            self._check_scope(word, token)
            self._push_name(self._text[name.start : name.end], word, (token.start, name.end))
            return True
        if self._strict and word.startswith("JMS") and word not in _HEADERS and word[3:4] not in ("X", "_"):
            self._stack.fail(
                f"{word[:40]} is not allowed in a selector",
                token.start,
                f"the header fields are {', '.join(sorted(_HEADERS))}; other names may not begin with JMS",
            )
        self._push_name(word, self._stack.scope, (token.start, token.end))
        return True

    def _push_name(self, name: str, scope: str, span: ast.Span) -> None:
        self._stack.push(ast.Name(name, "" if scope == self._home else scope, span))

    def _check_scope(self, scope: str, token: lexer.Token) -> None:
        if scope not in self._scopes:
            near = difflib.get_close_matches(scope, self._scopes, 1)
            self._stack.fail(
                f"there is no scope {scope[:40]!r}",
                token.start,
                f"did you mean {near[0]}?" if near else f"the scopes are {', '.join(self._scopes)}",
            )

    # An operator?

    def _operator(self) -> bool:
        """Process one operator, or close one group; True if an operand is expected next."""
        token = self._tokens[self._next]
        if token.kind == "end":
            return False
        self._next += 1
        if token.kind == "symbol":
            return self._symbol(token)
        match token.kind, token.value:
            case "reserved", "AND":
                self._stack.reduce(operand_stack.COMPARISON + 1)
                if self._stack.operators and self._stack.operators[-1].symbol in ("BETWEEN", "NOT BETWEEN"):
                    # This AND belongs to BETWEEN.
                    opened = self._stack.operators.pop()
                    self._stack.operators.append(opened._replace(symbol=f"{opened.symbol} AND"))
                    return True
                # AND and OR join any number of operands: wait for the last one.
                self._stack.reduce(operand_stack.AND + 1)
                self._stack.push_operator("AND", operand_stack.AND, token.start)
                return True
            case "reserved", "OR":
                self._stack.reduce(operand_stack.OR + 1)
                self._stack.push_operator("OR", operand_stack.OR, token.start)
                return True
            case _:
                return self._predicate(token)

    def _symbol(self, token: lexer.Token) -> bool:
        symbol = cast(str, token.value)
        if symbol in operand_stack.COMPARISONS:
            self._begin_comparison(token)
            precedence = operand_stack.COMPARISON
        elif symbol in _INFIX:
            precedence = _INFIX[symbol]
            self._stack.reduce(precedence)
        elif symbol in (")", "}"):
            self._stack.close_group(symbol, token.start, token.end)
            return False
        else:
            return self._predicate(token)
        self._stack.push_operator(symbol, precedence, token.start)
        return True

    def _begin_comparison(self, token: lexer.Token) -> None:
        self._stack.reduce(operand_stack.COMPARISON + 1)
        if self._stack.operators and self._stack.operators[-1].precedence == operand_stack.COMPARISON:
            self._stack.fail("comparisons do not chain", token.start, "join two comparisons with AND")

    def _predicate(self, token: lexer.Token) -> bool:
        """BETWEEN, IN, LIKE, IS NULL, CONTAINS; each with NOT inside as in English."""
        negated = token.kind == "reserved" and token.value == "NOT"
        if negated:
            token = self._take()
        word = token.value if token.kind == "reserved" else ""
        if token.kind == "word" and not self._strict and cast(str, token.value).upper() == "CONTAINS":
            word = "CONTAINS"
        if word not in ("BETWEEN", "IN", "LIKE", "CONTAINS") and (negated or word != "IS"):
            self._stack.fail(
                "expected BETWEEN, IN, LIKE or CONTAINS after NOT"
                if negated
                else f"expected an operator, not {self._shown(token)}",
                token.start,
                "join conditions with AND or OR; compare with =, <>, <, <=, >, >=",
            )
        self._begin_comparison(token)
        if word == "BETWEEN":
            self._stack.push_operator(
                "NOT BETWEEN" if negated else "BETWEEN", operand_stack.COMPARISON, token.start
            )
            return True
        left = self._stack.operands.pop()
        name = left.node
        if not isinstance(name, ast.Name):
            self._stack.fail(f"{word} applies to an attribute: a name is expected before it", left.start)
        clause: ast.Clause
        if word == "IS":
            negated = self._is("reserved", "NOT")
            self._next += negated
            null = self._take()
            if null.kind != "reserved" or null.value != "NULL":
                self._stack.fail(
                    f"IS is followed by NULL or NOT NULL, not {self._shown(null)}",
                    null.start,
                    "write IS NULL, IS NOT NULL, or =",
                )
            clause = ast.IsNull(name, (left.start, null.end))
        elif word == "IN":
            words = self._list()
            clause = ast.In(name, words, (left.start, self._tokens[self._next - 1].end))
        elif word == "LIKE":
            clause = self._like(name, left.start)
        else:
            string = self._expect_string("CONTAINS")
            clause = ast.Contains(name, cast(str, string.value), (left.start, string.end))
        self._stack.count_clauses(1, left.start)
        self._stack.push(ast.Not(clause, clause.span) if negated else clause, left.height + 1 + negated)
        return False

    def _list(self) -> tuple[str, ...]:
        opening = self._take()
        if opening.kind != "symbol" or opening.value != "(":
            self._stack.fail(
                f"IN needs a list, not {self._shown(opening)}", opening.start, "write IN ('a', 'b')"
            )
        words: list[str] = []
        while True:
            token = self._take()
            if token.kind != "string":
                self._stack.fail(
                    f"IN lists strings, and this is {self._shown(token)}",
                    token.start,
                    "write IN ('a', 'b'); for numbers, join comparisons with OR",
                )
            words.append(cast(str, token.value))
            token = self._take()
            if token.kind == "symbol" and token.value == ")":
                return tuple(words)
            if token.kind != "symbol" or token.value != ",":
                self._stack.fail(f"expected a comma or ')', not {self._shown(token)}", token.start)

    def _like(self, name: ast.Name, start: int) -> ast.Like:
        string = self._expect_string("LIKE")
        pattern, escape, end = cast(str, string.value), "", string.end
        if self._is("reserved", "ESCAPE"):
            self._next += 1
            character = self._expect_string("ESCAPE")
            escape, end = cast(str, character.value), character.end
            if len(escape) != 1:
                self._stack.fail("ESCAPE requires a single character", character.start, "write ESCAPE '!'")
        if len(pattern) > self._stack.bounds.pattern_length:
            raise errors.LimitExceeded(
                f"the pattern at character {string.start} has {len(pattern):,} characters, "
                f"and at most {self._stack.bounds.pattern_length} are allowed"
            )
        try:
            form = like_patterns.shape(pattern, escape)
        except ValueError as error:
            self._stack.fail(str(error), string.end - 2, "double the escape character to match it literally")
        runs = len(form.segments) - 1
        if runs > self._stack.bounds.pattern_wildcards:
            raise errors.LimitExceeded(
                f"the pattern at character {string.start} has {runs} runs of %, "
                f"and at most {self._stack.bounds.pattern_wildcards} are allowed"
            )
        self._gaps_length += like_patterns.gap_length(form)
        if self._gaps_length > self._stack.bounds.gaps_length:
            raise errors.LimitExceeded(
                f"the parts of patterns with _ between two % have {self._gaps_length:,} characters, "
                f"and at most {self._stack.bounds.gaps_length} are allowed in an expression",
                hint="write % in place of _ there, or drop the % around them",
            )
        return ast.Like(name, pattern, escape, (start, end))
