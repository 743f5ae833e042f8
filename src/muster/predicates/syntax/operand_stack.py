"""The stacks of the parser: operands become larger operands as operators are applied to them.

Whether an operand is a value or a condition is known only when an operator is applied: a parenthesis or a
bare name may be either. So operands are nodes of both kinds, and `OperandStack.condition` and
`OperandStack.value` require the one that is expected.

Limits are checked here as well, where nodes are created.
"""

from __future__ import annotations

from typing import Final, NamedTuple, NoReturn, cast

from muster.core import errors
from muster.predicates import ast, limits

OR, AND, NOT, COMPARISON, SUM, PRODUCT, SIGN = range(1, 8)  # precedence
COMPARISONS: Final = frozenset(ast.OPPOSITE)
CLOSING: Final = {"(": ")", "{": "}"}
_VALUES: Final = (ast.Literal, ast.Name, ast.Unary, ast.Arithmetic)


class StackOperand(NamedTuple):
    node: ast.Node
    start: int  # of the parsed text, with its parentheses
    end: int
    height: int


class StackOperator(NamedTuple):
    symbol: str
    precedence: int  # 0: an opened group
    start: int
    scope: str = ""  # for an opened group: the scope to return to
    named: bool = False  # it is a group such as sender: ( … )


class OperandStack:
    def __init__(self, text: str, *, bounds: limits.PredicateLimits) -> None:
        self._text = text
        self.bounds = bounds
        self.scope = ""  # of bare names, here
        self.operands: list[StackOperand] = []
        self.operators: list[StackOperator] = []
        self._open = 0
        self._clauses = 0

    def fail(self, message: str, position: int, hint: str | None = None) -> NoReturn:
        raise errors.ParseError(message, text=self._text, position=position, hint=hint)

    def push(self, node: ast.Node, height: int = 1) -> None:
        start, end = node.span
        if height > self.bounds.depth:
            self._refuse_depth(start)
        self.operands.append(StackOperand(node, start, end, height))

    def push_operator(self, symbol: str, precedence: int, start: int) -> None:
        self.operators.append(StackOperator(symbol, precedence, start))

    def open_group(self, symbol: str, start: int, scope: str, *, named: bool = False) -> None:
        self.operators.append(StackOperator(symbol, 0, start, self.scope, named))
        self.scope = scope
        self._open += 1
        if self._open > self.bounds.depth:
            self._refuse_depth(start)

    def close_group(self, symbol: str, start: int, end: int) -> None:
        self.reduce(1)
        if not self.operators:
            self.fail(f"this {symbol!r} closes nothing: no matching symbol precedes it", start)
        group = self.operators.pop()
        if CLOSING[group.symbol] != symbol:
            self.fail(
                f"{group.symbol!r} at character {group.start} is closed by {symbol!r}",
                start,
                f"write {CLOSING[group.symbol]}",
            )
        inside = self.operands.pop()
        node = inside.node
        if group.symbol == "{" or group.named:
            node = self.condition(inside)  # their operands are conditions, never parts of a value
        self.scope = group.scope
        self._open -= 1
        self.operands.append(StackOperand(node, group.start, end, inside.height))

    def finish(self) -> ast.Condition:
        self.reduce(1)
        if self.operators:
            group = self.operators[-1]
            self.fail(
                f"{group.symbol!r} is never closed", group.start, f"write {CLOSING[group.symbol]} at its end"
            )
        return self.condition(self.operands.pop())

    def reduce(self, least: int) -> None:
        """Apply the operators on top of the stack that bind at least so tightly."""
        while self.operators and self.operators[-1].precedence >= least:
            operator = self.operators.pop()
            match operator.symbol:
                case symbol if symbol in COMPARISONS:
                    self._compare(symbol)
                case "AND" | "OR" as symbol:
                    count = 2
                    while self.operators and self.operators[-1].symbol == symbol:
                        self.operators.pop()
                        count += 1
                    self._join(symbol, count)
                case "NOT":
                    inside = self.operands.pop()
                    node = ast.Not(self.condition(inside), (operator.start, inside.end))
                    self.push(node, inside.height + 1)
                case symbol if operator.precedence == SIGN:
                    inside = self.operands.pop()
                    span = (operator.start, inside.end)
                    value = self.value(inside, number=True)
                    self.push(ast.Unary("-" if symbol == "-" else "+", value, span), inside.height + 1)
                case "BETWEEN" | "NOT BETWEEN" as symbol:
                    self.fail(
                        f"{symbol} needs a lower and an upper bound", operator.start, "write BETWEEN 1 AND 5"
                    )
                case "BETWEEN AND" | "NOT BETWEEN AND" as symbol:
                    self._between(negated=symbol.startswith("NOT"))
                case symbol:
                    right, left = self.operands.pop(), self.operands.pop()
                    span = (left.start, right.end)
                    total = ast.Arithmetic(
                        cast(ast.ArithmeticOperator, symbol),
                        self.value(left, number=True),
                        self.value(right, number=True),
                        span,
                    )
                    self.push(total, max(left.height, right.height) + 1)

    def _join(self, symbol: str, count: int) -> None:
        parts = self.operands[-count:]
        del self.operands[-count:]
        conditions = tuple(self.condition(part) for part in parts)
        node = (ast.And if symbol == "AND" else ast.Or)(conditions, (parts[0].start, parts[-1].end))
        self.push(node, max(part.height for part in parts) + 1)

    def _compare(self, symbol: ast.ComparisonOperator) -> None:
        right, left = self.operands.pop(), self.operands.pop()
        if symbol not in ("=", "<>"):
            for side in (left, right):
                if isinstance(side.node, ast.Literal) and not side.node.kind.is_number:
                    self.fail(f"strings and booleans compare only with = and <>, not {symbol}", side.start)
        span = (left.start, right.end)
        self.count_clauses(1, left.start)
        node = ast.Comparison(symbol, self.value(left), self.value(right), span)
        self.push(node, max(left.height, right.height) + 1)

    def _between(self, *, negated: bool) -> None:
        high, low, middle = self.operands.pop(), self.operands.pop(), self.operands.pop()
        value = self.value(middle, number=True)
        bounds = self.value(low, number=True), self.value(high, number=True)
        span = (middle.start, high.end)
        signs: tuple[ast.ComparisonOperator, ast.ComparisonOperator] = ("<", ">") if negated else (">=", "<=")
        self.count_clauses(2, middle.start)
        node = (ast.Or if negated else ast.And)(
            tuple(
                ast.Comparison(sign, value, bound, span) for sign, bound in zip(signs, bounds, strict=True)
            ),
            span,
        )
        self.push(node, max(high.height, low.height, middle.height) + 2)

    def condition(self, operand: StackOperand) -> ast.Condition:
        node = operand.node
        if not isinstance(node, _VALUES):
            return node
        span = (operand.start, operand.end)
        if isinstance(node, ast.Name):
            self.count_clauses(1, operand.start)
            return ast.Comparison("=", node, ast.Literal(True, span), span)
        if not isinstance(node, ast.Literal) or not isinstance(node.value, bool):
            self.fail(
                "expected a condition; this is a value",
                operand.start,
                "compare it with something: =, <>, <, <=, >, >=",
            )
        self.count_clauses(1, operand.start)
        return ast.Constant(node.value, span)

    def value(self, operand: StackOperand, *, number: bool = False) -> ast.Expression:
        node = operand.node
        if not isinstance(node, _VALUES):
            self.fail(
                "expected a value; this is a condition",
                operand.start,
                "join conditions with AND, OR and NOT",
            )
        if number and isinstance(node, ast.Literal) and not node.kind.is_number:
            self.fail("expected a number or a name", operand.start)
        return node

    def _refuse_depth(self, position: int) -> NoReturn:
        raise errors.LimitExceeded(
            f"the expression is nested more than {self.bounds.depth} deep at character {position}",
            hint="remove needless parentheses, or write it as an OR of ANDs",
        )

    def count_clauses(self, count: int, position: int) -> None:
        self._clauses += count
        if self._clauses > self.bounds.clauses:
            raise errors.LimitExceeded(
                f"the expression has more than {self.bounds.clauses:,} clauses (at character {position})",
                hint="compare with a list: x IN ('a', 'b')",
            )
