"""The page about the history lists every column as the code defines it."""

import os
import re
from pathlib import Path

import pyarrow as pa

from muster.core.reports import columns
from muster.pipeline.history import tables

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "history.md"
_BETWEEN = re.compile(r"(<!-- tables -->\n).*(<!-- /tables -->)", re.DOTALL)


def type_name(kind: pa.DataType) -> str:
    """A type as SQL calls it."""
    if pa.types.is_map(kind):
        return f"MAP<{type_name(kind.key_type)}, {type_name(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"ARRAY<{type_name(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"STRUCT<{', '.join(f'{field.name}: {type_name(field.type)}' for field in kind)}>"
    names = {pa.string(): "STRING", pa.float64(): "DOUBLE", pa.int64(): "BIGINT", pa.bool_(): "BOOLEAN"}
    if pa.types.is_timestamp(kind):
        return "TIMESTAMP"
    return "DATE" if pa.types.is_date(kind) else names[kind]


def _rows(table: tables.TableDefinition) -> list[str]:
    """Statistics of metrics are one line for each metric."""
    lines = []
    shown = set()
    for column in table.columns:
        metric = next((name for name in columns.STANDARD_METRICS if column.name.startswith(f"{name}_")), None)
        name, description = f"`{column.name}`", column.description
        if metric is not None:
            if metric in shown:
                continue
            shown.add(metric)
            of = [other for other in table.columns if other.name.startswith(f"{metric}_")]
            name = ", ".join(f"`{other.name}`" for other in of)
            description = (
                f"Statistics of `{metric}`; `_count` is BIGINT"
                if table.name == tables.GROUPS
                else (f"Statistics of `{metric}` in the hour")
            )
            column = of[-1]
        null = "yes" if column.nullable else "no"
        lines.append(f"| {name} | {type_name(column.type)} | {column.unit} | {null} | {description} |")
    return lines


def generated() -> str:
    parts = []
    for table in tables.definitions().values():
        parts += [
            f"### `{table.name}`",
            "",
            table.description,
            "",
            f"Event time: `{table.time}`.",
            "",
            "| column | type | unit | NULL | meaning |",
            "|---|---|---|---|---|",
            *_rows(table),
            "",
        ]
    return "\n".join(parts)


def test_every_column_is_documented():
    text = PAGE.read_text()
    written = _BETWEEN.sub(lambda match: f"{match[1]}{generated()}{match[2]}", text)
    if os.environ.get("REWRITE"):
        PAGE.write_text(written)
    assert PAGE.read_text() == written, "REWRITE=1 pytest … writes it anew"
    assert f"version {tables.VERSION} of the schema" in text
    for table in tables.definitions().values():
        assert [column.name for column in table.columns if f"`{column.name}`" not in written] == []
