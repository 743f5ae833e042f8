"""The stored results of `make fuzz SAVE=1`, and the table of docs/testing.md that shows them."""

from __future__ import annotations

import datetime
import json
import pathlib
import re

import msgspec

FILE = pathlib.Path(__file__).parent / "results.json"
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "testing.md"
BLOCK = re.compile(r"(<!-- fuzz -->\n).*?(<!-- /fuzz -->)", re.DOTALL)


class FuzzRow(msgspec.Struct, frozen=True, kw_only=True):
    """The newest run of a target."""

    name: str
    kind: str  # parser or endpoint
    inputs: int
    result: str  # ok, or what failed
    date: str = msgspec.field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date().isoformat())


def load() -> dict[str, FuzzRow]:
    if not FILE.exists():
        return {}
    return {row["name"]: msgspec.convert(row, FuzzRow) for row in json.loads(FILE.read_text())}


def save(row: FuzzRow) -> None:
    rows = load() | {row.name: row}
    ordered = sorted(rows.values(), key=lambda row: (row.kind != "parser", row.name))
    FILE.write_text(json.dumps([msgspec.to_builtins(row) for row in ordered], indent=1) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), ordered))


def filled(page: str, rows: list[FuzzRow]) -> str:
    lines = ["| target | inputs | result | date |", "|---|---|---|---|"]
    lines += [f"| {row.kind} `{row.name}` | {row.inputs:,} | {row.result} | {row.date} |" for row in rows]
    table = "\n".join(lines)
    return BLOCK.sub(lambda match: f"{match[1]}{table}\n{match[2]}", page)
