"""The tree back into text: ``parse(write(x)) == x`` for every tree.

The text is canonical: one notation for each tree, words in capitals, single spaces, no redundant parentheses.
Extensions are used only where they are needed, so strict selectors stay strict.
"""

from __future__ import annotations

from typing import Final

from muster.predicates import ast

_SUM, _PRODUCT, _SIGN, _ATOM = range(4)
_PRECEDENCE: Final = {"+": _SUM, "-": _SUM, "*": _PRODUCT, "/": _PRODUCT}


def write(node: ast.Node) -> str:
    match node:
        case ast.And() | ast.Or():
            # An OR inside an AND needs them; an AND inside an AND has them so that the tree is kept.
            tight = isinstance(node, ast.And)
            joined = " AND " if tight else " OR "
            return joined.join(
                f"({write(part)})"
                if isinstance(part, ast.Or) or (tight and isinstance(part, ast.And))
                else write(part)
                for part in node.operands
            )
        case ast.Not(operand=ast.In() | ast.Like() | ast.IsNull() | ast.Contains() as inside):
            return _about(inside, "NOT ")
        case ast.Not(operand=ast.And() | ast.Or() as inside):
            return f"NOT ({write(inside)})"
        case ast.Not():
            return f"NOT {write(node.operand)}"
        case ast.In() | ast.Like() | ast.IsNull() | ast.Contains():
            return _about(node, "")
        case ast.Comparison():
            return f"{_value(node.left, _SUM)} {node.operator} {_value(node.right, _SUM)}"
        case ast.Constant():
            return "TRUE" if node.value else "FALSE"
        case _:
            return _value(node, _SUM)


def quoted(word: str) -> str:
    return "'" + word.replace("'", "''") + "'"


def _about(clause: ast.In | ast.Like | ast.IsNull | ast.Contains, negation: str) -> str:
    name = clause.name.key
    match clause:
        case ast.In():
            return f"{name} {negation}IN ({', '.join(map(quoted, clause.words))})"
        case ast.Like():
            escape = f" ESCAPE {quoted(clause.escape)}" if clause.escape else ""
            return f"{name} {negation}LIKE {quoted(clause.pattern)}{escape}"
        case ast.IsNull():
            return f"{name} IS {negation}NULL"
        case ast.Contains():
            return f"{name} {negation}CONTAINS {quoted(clause.word)}"


def _value(node: ast.Expression, least: int) -> str:
    """In parentheses where it binds less tightly than ``least``."""
    match node:
        case ast.Literal(value=bool(value)):
            return "TRUE" if value else "FALSE"
        case ast.Literal(value=str(value)):
            return quoted(value)
        case ast.Literal():
            return repr(node.value)
        case ast.Name():
            return node.key
        case ast.Unary(operand=ast.Literal() as inside):
            # In parentheses, so that the sign does not become part of the number.
            return f"{node.operator}({_value(inside, _SUM)})"
        case ast.Unary():
            return f"{node.operator}{_value(node.operand, _SIGN)}"
        case ast.Arithmetic():
            here = _PRECEDENCE[node.operator]
            text = f"{_value(node.left, here)} {node.operator} {_value(node.right, here + 1)}"
            return f"({text})" if here < least else text
