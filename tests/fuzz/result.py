"""The stored results of `make fuzz SAVE=1`, and their table."""

from __future__ import annotations

import datetime
import json
import pathlib
from typing import Any

import msgspec

FILE = pathlib.Path(__file__).parent / "results.json"


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


def markdown(stored: Any) -> str:
    lines = ["| target | inputs | result | date |", "|---|---|---|---|"]
    lines += [
        f"| {row.kind} `{row.name}` | {row.inputs:,} | {row.result} | {row.date} |"
        for row in msgspec.convert(stored, list[FuzzRow])
    ]
    return "\n".join(lines) + "\n"
