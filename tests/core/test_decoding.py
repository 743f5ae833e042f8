"""Where data are decoded, a document of a hundred thousand brackets is malformed like any other,
and so is one that is not UTF-8.

Decoders raise RecursionError and UnicodeDecodeError for them, which are no errors of msgspec: a task that
does not expect them ends.
"""

from __future__ import annotations

import ast
from pathlib import Path

import muster

SOURCES = Path(muster.__file__).parent
DECODERS = {"json.loads", "json.load", "msgspec.json.decode", "msgspec.msgpack.decode"}
NESTED = {"RecursionError", "RuntimeError", "Exception", "BaseException"}
NO_TEXT = {"UnicodeDecodeError", "UnicodeError", "ValueError", "Exception", "BaseException"}


def _decodes(body: list[ast.stmt]) -> bool:
    nodes = (node for part in body for node in ast.walk(part))
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) in DECODERS for node in nodes)


def _names(caught: ast.expr) -> set[str]:
    return {ast.unparse(name) for name in (caught.elts if isinstance(caught, ast.Tuple) else [caught])}


def test_who_expects_malformed_data_expects_all_of_it():
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
            if expects and not (names & NESTED and names & NO_TEXT):
                missing.append(f"{path.relative_to(SOURCES)}:{node.lineno}")
    assert not missing
