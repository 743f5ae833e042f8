"""Text into the tree.

An operator-precedence parser with its own stacks: nothing recurses, so no text can reach the limit of
Python's.  It alternates between two questions, "an operand?" and "an operator?", and every error says which
of the two it was asking and what would have answered it.

*Strict* is the grammar of JMS message selectors and nothing else.  *Extended*, the default, adds

    ==  !=                       the same as  =  <>
    "northwest"                  the same as  'northwest'
    alert                        the same as  alert = TRUE, where a condition is needed
    services CONTAINS 'cgi'      whether a set holds a word
    sender.entity                an attribute of somebody else than the subject itself
    sender: ( a = 1 AND b = 2 )  the bare names in this group are the sender's
    { … }                        the same as ( … )

and reserves no further word: an attribute may be called ``contains`` or ``sender``.

Bare names are those of the subject: the message, the event, the receiver.  Where the subject has a scope of
its own, ``home`` names it, and then ``event.x`` and ``x`` are one name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final, NamedTuple, NoReturn, cast

from muster.core import errors
from muster.predicates import ast, lexer, like, limits, types

SCOPES: Final = ("sender", "receiver", "event")

_OR, _AND, _NOT, _COMPARISON, _SUM, _PRODUCT, _SIGN = range(1, 8)
_INFIX: Final = {"+": _SUM, "-": _SUM, "*": _PRODUCT, "/": _PRODUCT}
_COMPARISONS: Final = frozenset(ast.OPPOSITE)
_CLOSING: Final = {"(": ")", "{": "}"}
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
    bounds: limits.Limits = limits.DEFAULT,
) -> ast.Condition:
    """The condition that ``text`` says; `errors.ParseError` or `errors.LimitExceeded` if it says none.

    A blank strict selector is TRUE: to JMS, it is no selector at all.
    """
    if not isinstance(text, str):
        raise errors.InvalidInput(f"an expression is text, not {type(text).__name__}")
    if len(text) > bounds.text_length:
        raise errors.LimitExceeded(
            f"the expression has {len(text):,} characters, and at most {bounds.text_length:,} are allowed",
            hint="split it, or compare with fewer values",
        )
    found = lexer.tokens(text, strict=strict)
    if len(found) == 1:
        if strict:
            return ast.Constant(True)
        raise errors.ParseError(
            "the expression is empty", text=text, position=0, hint="TRUE is the condition that always holds"
        )
    return _Parser(text, found, strict=strict, home=home, scopes=tuple(scopes), bounds=bounds).run()


class _Operand(NamedTuple):
    node: ast.Node
    start: int  # of the text it came from, its parentheses included
    end: int
    height: int


class _Operator(NamedTuple):
    symbol: str
    precedence: int  # 0: an opened group
    start: int
    scope: str = ""  # of an opened group: the scope to return to
    named: bool = False  # it is a group such as sender: ( … )


class _Parser:
    def __init__(
        self,
        text: str,
        found: list[lexer.Token],
        *,
        strict: bool,
        home: str | None,
        scopes: tuple[str, ...],
        bounds: limits.Limits,
    ) -> None:
        self._text = text
        self._tokens = found
        self._next = 0
        self._strict = strict
        self._home = home
        self._scopes = scopes
        self._bounds = bounds
        self._scope = ""  # of bare names, here
        self._open = 0
        self._clauses = 0
        self._operands: list[_Operand] = []
        self._operators: list[_Operator] = []

    def run(self) -> ast.Condition:
        while True:
            while not self._operand():
                pass
            while not self._operator():
                if self._tokens[self._next].kind == "end":
                    return self._finish()

    # Reading

    def _take(self) -> lexer.Token:
        token = self._tokens[self._next]
        self._next += 1
        return token

    def _is(self, kind: str, value: str) -> bool:
        token = self._tokens[self._next]
        return token.kind == kind and token.value == value

    def _fail(self, message: str, position: int, hint: str | None = None) -> NoReturn:
        raise errors.ParseError(message, text=self._text, position=position, hint=hint)

    def _shown(self, token: lexer.Token) -> str:
        return repr(self._text[token.start : token.end][:40]) if token.kind != "end" else "the end"

    def _expect_string(self, after: str) -> lexer.Token:
        token = self._take()
        if token.kind != "string":
            self._fail(
                f"{after} needs a string, not {self._shown(token)}", token.start, f"write {after} 'text'"
            )
        return token

    # An operand?

    def _operand(self) -> bool:
        """Take one token where an operand is due; whether that completed one."""
        token = self._take()
        match token.kind, token.value:
            case "number", value:
                self._number(cast("int | float", value), token, token.start)
            case "string", value:
                self._push(ast.Literal(value, (token.start, token.end)))
            case "word", _:
                return self._word(token)
            case "reserved", "TRUE" | "FALSE":
                self._push(ast.Literal(token.value == "TRUE", (token.start, token.end)))
            case "reserved", "NOT":
                if self._operators and self._operators[-1].precedence >= _COMPARISON:
                    self._fail(
                        "NOT turns a condition round, and a value is due here",
                        token.start,
                        "put NOT in front of the whole comparison",
                    )
                self._operators.append(_Operator("NOT", _NOT, token.start))
                return False
            case "reserved", "NULL":
                self._fail(
                    "NULL is not a value to compare with", token.start, "write x IS NULL or x IS NOT NULL"
                )
            case "symbol", "(" | "{":
                self._open_group(token, self._scope)
                return False
            case "symbol", "+" | "-":
                number = self._tokens[self._next]
                if number.kind == "number":
                    self._next += 1
                    value = cast("int | float", number.value)
                    self._number(-value if token.value == "-" else value, number, token.start)
                else:
                    self._operators.append(_Operator(cast(str, token.value), _SIGN, token.start))
                    return False
            case _:
                self._fail(
                    f"a name, a value or a condition is due here, not {self._shown(token)}",
                    token.start,
                    "for example: threat_level >= 4",
                )
        return True

    def _number(self, value: int | float, token: lexer.Token, start: int) -> None:
        if value.__class__ is int and value > types.INT_MAX:
            raise lexer.too_large(self._text, token)
        self._push(ast.Literal(value, (start, token.end)))

    def _word(self, token: lexer.Token) -> bool:
        word = cast(str, token.value)
        if self._is("symbol", ":"):
            colon = self._take()
            self._check_scope(word, token)
            opening = self._take()
            if opening.value not in _CLOSING or opening.kind != "symbol":
                self._fail(
                    f"a group is due after '{word}:', not {self._shown(opening)}",
                    opening.start if opening.kind != "end" else colon.start,
                    f"write {word}: ( … )",
                )
            self._open_group(opening, word, named_at=token.start)
            return False
        if self._is("symbol", "."):
            dot, name = self._take(), self._take()
            if name.kind not in ("word", "reserved") or token.end != dot.start or dot.end != name.start:
                self._fail(f"an attribute's name is due right after '{word}.'", dot.end, f"write {word}.name")
            self._check_scope(word, token)
            self._push_name(self._text[name.start : name.end], word, (token.start, name.end))
            return True
        if self._strict and word.startswith("JMS") and word not in _HEADERS and word[3:4] not in ("X", "_"):
            self._fail(
                f"{word[:40]} cannot be used in a selector",
                token.start,
                f"the header fields are {', '.join(sorted(_HEADERS))}; other names may not begin with JMS",
            )
        self._push_name(word, self._scope, (token.start, token.end))
        return True

    def _push_name(self, name: str, scope: str, span: ast.Span) -> None:
        self._push(ast.Name(name, "" if scope == self._home else scope, span))

    def _check_scope(self, scope: str, token: lexer.Token) -> None:
        if scope not in self._scopes:
            near = difflib.get_close_matches(scope, self._scopes, 1)
            self._fail(
                f"there is no scope {scope[:40]!r}",
                token.start,
                f"did you mean {near[0]}?" if near else f"the scopes are {', '.join(self._scopes)}",
            )

    def _open_group(self, opening: lexer.Token, scope: str, named_at: int | None = None) -> None:
        named = named_at is not None
        start = opening.start if named_at is None else named_at
        self._operators.append(_Operator(cast(str, opening.value), 0, start, self._scope, named))
        self._scope = scope
        self._open += 1
        if self._open > self._bounds.depth:
            self._refuse_depth(opening.start)

    # An operator?

    def _operator(self) -> bool:
        """Take one operator, or close one group; whether an operand is due next."""
        token = self._tokens[self._next]
        if token.kind == "end":
            return False
        self._next += 1
        if token.kind == "symbol" and (token.value == ")" or token.value == "}"):
            self._close_group(token)
            return False
        match token.kind, token.value:
            case "reserved", "AND":
                self._reduce(_COMPARISON + 1)
                if self._operators and self._operators[-1].symbol in ("BETWEEN", "NOT BETWEEN"):
                    # This AND belongs to BETWEEN.
                    opened = self._operators.pop()
                    self._operators.append(opened._replace(symbol=f"{opened.symbol} AND"))
                    return True
                # AND and OR join any number of operands: wait for the last one.
                self._reduce(_AND + 1)
                self._operators.append(_Operator("AND", _AND, token.start))
                return True
            case "reserved", "OR":
                self._reduce(_OR + 1)
                self._operators.append(_Operator("OR", _OR, token.start))
                return True
            case "symbol", symbol if symbol in _COMPARISONS:
                self._begin_comparison(token)
                self._operators.append(_Operator(cast(str, symbol), _COMPARISON, token.start))
                return True
            case "symbol", symbol if symbol in _INFIX:
                precedence = _INFIX[symbol]
                self._reduce(precedence)
                self._operators.append(_Operator(symbol, precedence, token.start))
                return True
            case _:
                return self._predicate(token)

    def _begin_comparison(self, token: lexer.Token) -> None:
        self._reduce(_COMPARISON + 1)
        if self._operators and self._operators[-1].precedence == _COMPARISON:
            self._fail("comparisons do not chain", token.start, "join two comparisons with AND")

    def _predicate(self, token: lexer.Token) -> bool:
        """BETWEEN, IN, LIKE, IS NULL, CONTAINS; each with NOT inside where English has it."""
        negated = token.kind == "reserved" and token.value == "NOT"
        if negated:
            token = self._take()
        word = token.value if token.kind == "reserved" else ""
        if token.kind == "word" and not self._strict and cast(str, token.value).upper() == "CONTAINS":
            word = "CONTAINS"
        if word not in ("BETWEEN", "IN", "LIKE", "CONTAINS") and (negated or word != "IS"):
            self._fail(
                "after NOT, BETWEEN, IN, LIKE or CONTAINS is due here"
                if negated
                else f"an operator is due here, not {self._shown(token)}",
                token.start,
                "join conditions with AND or OR; compare with =, <>, <, <=, >, >=",
            )
        self._begin_comparison(token)
        if word == "BETWEEN":
            self._operators.append(
                _Operator("NOT BETWEEN" if negated else "BETWEEN", _COMPARISON, token.start)
            )
            return True
        left = self._operands.pop()
        name = left.node
        if not isinstance(name, ast.Name):
            self._fail(f"{word} asks about an attribute: a name has to stand before it", left.start)
        clause: ast.Clause
        if word == "IS":
            negated = self._is("reserved", "NOT")
            self._next += negated
            null = self._take()
            if null.kind != "reserved" or null.value != "NULL":
                self._fail(
                    f"IS asks only about NULL, not {self._shown(null)}",
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
        self._count_clauses(1, left.start)
        self._push(ast.Not(clause, clause.span) if negated else clause, left.height + 1 + negated)
        return False

    def _list(self) -> tuple[str, ...]:
        opening = self._take()
        if opening.kind != "symbol" or opening.value != "(":
            self._fail(f"IN needs a list, not {self._shown(opening)}", opening.start, "write IN ('a', 'b')")
        words: list[str] = []
        while True:
            token = self._take()
            if token.kind != "string":
                self._fail(
                    f"IN lists strings, and this is {self._shown(token)}",
                    token.start,
                    "write IN ('a', 'b'); for numbers, join comparisons with OR",
                )
            words.append(cast(str, token.value))
            token = self._take()
            if token.kind == "symbol" and token.value == ")":
                return tuple(words)
            if token.kind != "symbol" or token.value != ",":
                self._fail(f"a comma or ')' is due here, not {self._shown(token)}", token.start)

    def _like(self, name: ast.Name, start: int) -> ast.Like:
        string = self._expect_string("LIKE")
        pattern, escape, end = cast(str, string.value), "", string.end
        if self._is("reserved", "ESCAPE"):
            self._next += 1
            character = self._expect_string("ESCAPE")
            escape, end = cast(str, character.value), character.end
            if len(escape) != 1:
                self._fail("ESCAPE takes a single character", character.start, "write ESCAPE '!'")
        if len(pattern) > self._bounds.pattern_length:
            raise errors.LimitExceeded(
                f"the pattern at character {string.start} has {len(pattern):,} characters, "
                f"and at most {self._bounds.pattern_length} are allowed"
            )
        try:
            runs = len(like.shape(pattern, escape).segments) - 1
        except ValueError as error:
            self._fail(str(error), string.end - 2, "double the escape character to mean itself")
        if runs > self._bounds.pattern_wildcards:
            raise errors.LimitExceeded(
                f"the pattern at character {string.start} has {runs} runs of %, "
                f"and at most {self._bounds.pattern_wildcards} are allowed"
            )
        return ast.Like(name, pattern, escape, (start, end))

    # Building

    def _close_group(self, token: lexer.Token) -> None:
        self._reduce(1)
        if not self._operators:
            self._fail(f"nothing was opened that this {token.value!r} could close", token.start)
        group = self._operators.pop()
        if _CLOSING[group.symbol] != token.value:
            self._fail(
                f"{group.symbol!r} at character {group.start} is closed by {token.value!r}",
                token.start,
                f"write {_CLOSING[group.symbol]}",
            )
        inside = self._operands.pop()
        node = inside.node
        if group.symbol == "{" or group.named:
            node = self._condition(inside)  # these hold whole conditions, never parts of a value
        self._scope = group.scope
        self._open -= 1
        self._operands.append(_Operand(node, group.start, token.end, inside.height))

    def _finish(self) -> ast.Condition:
        self._reduce(1)
        if self._operators:
            group = self._operators[-1]
            self._fail(
                f"{group.symbol!r} is never closed", group.start, f"write {_CLOSING[group.symbol]} at its end"
            )
        return self._condition(self._operands.pop())

    def _reduce(self, least: int) -> None:
        """Apply the operators on top of the stack that bind at least so tightly."""
        while self._operators and self._operators[-1].precedence >= least:
            operator = self._operators.pop()
            match operator.symbol, operator.precedence:
                case ("AND" | "OR") as symbol, _:
                    count = 2
                    while self._operators and self._operators[-1].symbol == symbol:
                        self._operators.pop()
                        count += 1
                    self._join(symbol, count)
                case "NOT", _:
                    inside = self._operands.pop()
                    node = ast.Not(self._condition(inside), (operator.start, inside.end))
                    self._push(node, inside.height + 1)
                case symbol, precedence if precedence == _SIGN:
                    inside = self._operands.pop()
                    span = (operator.start, inside.end)
                    value = self._value(inside, number=True)
                    self._push(ast.Unary("-" if symbol == "-" else "+", value, span), inside.height + 1)
                case ("BETWEEN" | "NOT BETWEEN") as symbol, _:
                    self._fail(
                        f"{symbol} needs a lower and an upper bound", operator.start, "write BETWEEN 1 AND 5"
                    )
                case ("BETWEEN AND" | "NOT BETWEEN AND") as symbol, _:
                    self._between(negated=symbol.startswith("NOT"))
                case symbol, _ if symbol in _COMPARISONS:
                    self._compare(symbol)
                case symbol, _:
                    right, left = self._operands.pop(), self._operands.pop()
                    span = (left.start, right.end)
                    total = ast.Arithmetic(
                        cast(ast.ArithmeticOperator, symbol),
                        self._value(left, number=True),
                        self._value(right, number=True),
                        span,
                    )
                    self._push(total, max(left.height, right.height) + 1)

    def _join(self, symbol: str, count: int) -> None:
        parts = self._operands[-count:]
        del self._operands[-count:]
        conditions = tuple(self._condition(part) for part in parts)
        node = (ast.And if symbol == "AND" else ast.Or)(conditions, (parts[0].start, parts[-1].end))
        self._push(node, max(part.height for part in parts) + 1)

    def _compare(self, symbol: ast.ComparisonOperator) -> None:
        right, left = self._operands.pop(), self._operands.pop()
        for side in (left, right):
            if (
                isinstance(side.node, ast.Literal)
                and symbol not in ("=", "<>")
                and not side.node.kind.is_number
            ):
                self._fail(f"strings and booleans compare only with = and <>, not {symbol}", side.start)
        span = (left.start, right.end)
        self._count_clauses(1, left.start)
        node = ast.Comparison(symbol, self._value(left), self._value(right), span)
        self._push(node, max(left.height, right.height) + 1)

    def _between(self, *, negated: bool) -> None:
        high, low, middle = self._operands.pop(), self._operands.pop(), self._operands.pop()
        value = self._value(middle, number=True)
        bounds = self._value(low, number=True), self._value(high, number=True)
        span = (middle.start, high.end)
        signs: tuple[ast.ComparisonOperator, ast.ComparisonOperator] = ("<", ">") if negated else (">=", "<=")
        self._count_clauses(2, middle.start)
        node = (ast.Or if negated else ast.And)(
            tuple(
                ast.Comparison(sign, value, bound, span) for sign, bound in zip(signs, bounds, strict=True)
            ),
            span,
        )
        self._push(node, max(high.height, low.height, middle.height) + 2)

    def _condition(self, operand: _Operand) -> ast.Condition:
        node, span = operand.node, (operand.start, operand.end)
        match node:
            case ast.Name():
                if self._strict:
                    self._fail(
                        "a name alone is not a condition in strict selectors",
                        operand.start,
                        f"write {node.key} = TRUE",
                    )
                self._count_clauses(1, operand.start)
                return ast.Comparison("=", node, ast.Literal(True, span), span)
            case ast.Literal(value=bool(value)):
                self._count_clauses(1, operand.start)
                return ast.Constant(value, span)
            case ast.Literal() | ast.Unary() | ast.Arithmetic():
                self._fail(
                    "a condition is due here, and this is only a value",
                    operand.start,
                    "compare it with something: =, <>, <, <=, >, >=",
                )
        return node

    def _value(self, operand: _Operand, *, number: bool = False) -> ast.Expression:
        node = operand.node
        if not isinstance(node, ast.Literal | ast.Name | ast.Unary | ast.Arithmetic):
            self._fail(
                "a value is due here, and this is a condition",
                operand.start,
                "join conditions with AND, OR and NOT",
            )
        if number and isinstance(node, ast.Literal) and not node.kind.is_number:
            self._fail("a number or a name is due here", operand.start)
        return node

    def _push(self, node: ast.Node, height: int = 1) -> None:
        start, end = node.span
        if height > self._bounds.depth:
            self._refuse_depth(start)
        self._operands.append(_Operand(node, start, end, height))

    def _refuse_depth(self, position: int) -> NoReturn:
        raise errors.LimitExceeded(
            f"the expression is nested more than {self._bounds.depth} deep at character {position}",
            hint="remove needless parentheses, or write it as an OR of ANDs",
        )

    def _count_clauses(self, count: int, position: int) -> None:
        self._clauses += count
        if self._clauses > self._bounds.clauses:
            raise errors.LimitExceeded(
                f"the expression has more than {self._bounds.clauses:,} clauses (at character {position})",
                hint="compare with a list: x IN ('a', 'b')",
            )
