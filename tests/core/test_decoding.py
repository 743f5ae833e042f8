"""A document of a hundred thousand open brackets is malformed like any other, wherever data are decoded.

Decoders raise RecursionError for it, which is neither a ValueError nor an error of msgspec: a task that does
not expect it ends.
"""

from __future__ import annotations

import ast
from pathlib import Path

import muster

SOURCES = Path(muster.__file__).parent
DECODERS = {"json.loads", "json.load", "msgspec.json.decode", "msgspec.msgpack.decode"}
ENOUGH = {"RecursionError", "RuntimeError", "Exception", "BaseException"}


def _decodes(body: list[ast.stmt]) -> bool:
    nodes = (node for part in body for node in ast.walk(part))
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) in DECODERS for node in nodes)


def _names(caught: ast.expr) -> set[str]:
    return {ast.unparse(name) for name in (caught.elts if isinstance(caught, ast.Tuple) else [caught])}


def test_who_expects_malformed_data_expects_deeply_nested_data():
    missing = []
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            caught: list[ast.expr] = []
            if not isinstance(node, ast.Try | ast.With) or not _decodes(node.body):
                continue
            if isinstance(node, ast.Try):
                caught = [handler.type for handler in node.handlers if handler.type is not None]
            else:
                for item in node.items:
                    call = item.context_expr
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "contextlib.suppress":
                        caught += call.args
            names = set().union(*map(_names, caught))
            expects = any(name.endswith(("MsgspecError", "DecodeError", "ValueError")) for name in names)
            if expects and not names & ENOUGH:
                missing.append(f"{path.relative_to(SOURCES)}:{node.lineno}")
    assert not missing
