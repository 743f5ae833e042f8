"""TOML with the line of each key, which the standard library does not provide; and values written as TOML."""

from __future__ import annotations

import json
import pathlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.core import errors

MAX_BYTES = 1 << 20

Path = tuple[str, ...]

_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?\Z")
_NAME = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_KEY = re.compile(rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")


@dataclass(frozen=True, slots=True)
class TomlDocument:
    """A parsed file. ``lines`` is for messages only: a multi-line text that looks like keys may make it
    wrong."""

    tree: Mapping[str, Any]
    lines: Mapping[Path, int]

    def line(self, path: Path) -> int | None:
        """The line of the key, or else of the table to which it would belong."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None)


def read(path: pathlib.Path) -> TomlDocument:
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise errors.NotFound(f"there is no file {path}") from error
    except OSError as error:
        raise errors.InvalidInput(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise errors.LimitExceeded(f"{path} is over {MAX_BYTES} bytes")
    try:
        text = data.decode()
        tree = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise errors.InvalidInput(f"{path}: not UTF-8 text (byte {error.start})") from error
    except (ValueError, RecursionError) as error:  # the parser's own error is a ValueError, and so are others
        raise errors.InvalidInput(f"{path}: not TOML: {error}") from error
    return TomlDocument(tree, _lines(text))


def read_list(text: str) -> list[Any]:
    """A list in one line, as ``["a", "b"]``."""
    try:
        tree = tomllib.loads(f"list = {text}")
    except (ValueError, RecursionError) as error:
        raise errors.InvalidInput(f'not a list, such as ["a", "b"]: {error}') from error
    if list(tree) != ["list"] or not isinstance(tree["list"], list):
        raise errors.InvalidInput('not a list, such as ["a", "b"]')
    return tree["list"]


def _lines(text: str) -> dict[Path, int]:
    lines: dict[Path, int] = {}
    table: Path = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _names(header[1])
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault(table + _names(key[1]), number)
    return lines


def _names(dotted: str) -> Path:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def sections(values: Mapping[str, Any]) -> str:
    """A settings file. The keys are those of settings: ``section.name``."""
    lines: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        lines.setdefault(section, []).append(f"{name} = {write(value)}")
    return "".join(f"\n[{section}]\n" + "\n".join(of) + "\n" for section, of in lines.items())


def write(value: Any) -> str:
    """Text, a number, a truth, or several of them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON escapes are valid in TOML, except for DEL, which TOML requires to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(write, value))}]"
    return repr(value)
