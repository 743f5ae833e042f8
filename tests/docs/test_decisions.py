"""Decision records: unique numbers, and all of them in the index."""

from __future__ import annotations

import os
import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))


def test_each_number_is_used_once_and_is_the_titles():
    numbers = [int(record.name[:4]) for record in RECORDS]
    assert len(numbers) == len(set(numbers))
    titles = [re.match(r"# (\d+)\. \S", record.read_text()) for record in RECORDS]
    assert [
        int(title[1]) if title else record.name for title, record in zip(titles, RECORDS, strict=True)
    ] == numbers


def test_the_index_lists_every_record_by_its_title():
    index = FOLDER / "README.md"
    entries = [
        f"- [{record.read_text().splitlines()[0].removeprefix('# ')}]({record.name})\n" for record in RECORDS
    ]
    text = index.read_text().partition("\n- ")[0] + "\n" + "".join(entries)
    if os.environ.get("REWRITE"):
        index.write_text(text)
    assert index.read_text() == text, "REWRITE=1 pytest … writes it anew"


def test_each_decision_has_context_and_decision():
    silent = [
        record.name
        for record in RECORDS
        if not all(word in record.read_text() for word in ("**Context.**", "**Decision.**"))
    ]
    assert silent == []
