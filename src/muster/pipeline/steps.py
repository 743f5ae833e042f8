"""Steps of a user in the pipeline: metrics that are computed from reports, beside those that machines report.

docs/guides/pipeline-spark.md describes what a step gets and returns.  Numbers for each machine (``MEMORY``)
are part of the state of the fleet: exactly once, as everything else in it.  A step with memory gets at most
one report of a machine in a call, those of a machine in the order in which it sent them; a report that was
overtaken by a later one, or is repeated, is left out.

The results must depend on nothing but the arguments: after a crash a batch is computed again.  A step that
fails, takes longer than `LIMIT_S` or returns something else than a number for each row is counted, logged and
raises the alert `step-failing`; the reports of that batch go on without its metrics.

`run` applies a step to rows of the history, as in a test.
"""

from __future__ import annotations

import functools
import importlib
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from muster.core import errors, files
from muster.core.reports import columns
from muster.pipeline.fleet import blocks, cells, node_columns, rollups
from muster.pipeline.history import rollup_rows, tables

Floats = npt.NDArray[np.float64]
T = TypeVar("T")

LIMIT_S = 5.0  # for one call: some ten thousand reports, or the groups of a batch
METRICS_MAX = 64  # of one step
NAME_MAX = 256
FAILED = "step-failed "  # prefix of counters, with the name of the step


@dataclass(frozen=True, slots=True)
class StepCode:
    """Where a step is: plain data, because it is sent to the executors."""

    name: str
    text: str | None = None  # of a file; None: an installed module


@dataclass(frozen=True, slots=True)
class Step:
    """A loaded step."""

    name: str
    reports: Callable[..., Any] | None
    groups: Callable[..., Any] | None
    memory: Mapping[str, float] = field(default_factory=dict)  # names and the numbers of new machines

    def column(self, key: str) -> str:
        """The column of a shard's machines with this number."""
        return f"step {self.name} {key}"


class StepFailed(errors.InvalidInput):
    code = "step-failed"


def read(named: Sequence[str]) -> tuple[StepCode, ...]:
    """The steps of a setting. `errors.InvalidInput` if one cannot be loaded. Blocks."""
    codes: dict[str, StepCode] = {}
    for name in named:
        text = None
        if name.endswith(".py"):
            path = files.expanded(name)
            try:
                name, text = path.stem, path.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise errors.InvalidInput(f"steps: cannot read {str(path)!r}: {error}") from error
        if name in codes:
            raise errors.InvalidInput(f"steps: two steps have the name {name!r}")
        codes[name] = StepCode(name, text)
        load(codes[name])
    return tuple(codes.values())


@functools.lru_cache(64)
def load(code: StepCode) -> Step:
    """Run the module. `errors.InvalidInput` if that fails, or it is no step."""
    try:
        if code.text is None:
            module = importlib.import_module(code.name)
        else:
            module = types.ModuleType(code.name)
            exec(compile(code.text, f"{code.name}.py", "exec"), module.__dict__)
        memory = {str(key): float(start) for key, start in getattr(module, "MEMORY", {}).items()}
    except (Exception, SystemExit) as error:
        raise errors.InvalidInput(
            f"steps: {code.name!r} cannot be loaded: {_described(error)}",
            hint="a file (ending with .py) or an installed module",
        ) from error
    step = Step(code.name, getattr(module, "reports", None), getattr(module, "groups", None), memory)
    if not (callable(step.reports) or callable(step.groups)):
        raise errors.InvalidInput(f"steps: {code.name!r} has neither a function `reports` nor `groups`")
    return step


def memory_columns(codes: Sequence[StepCode]) -> tuple[tuple[str, float], ...]:
    """The columns of machines that these steps need, and their initial values."""
    loaded = [load(code) for code in codes]
    return tuple((step.column(key), start) for step in loaded for key, start in step.memory.items())


def metric(rows: pa.RecordBatch | pa.Table, name: str) -> Floats:
    """A metric of each row, standard or not; NaN where it was not measured."""
    if name in rows.schema.names:
        values: Floats = _array(rows.column(name))
        return values
    maps = rows.column("metrics")
    if isinstance(maps, pa.ChunkedArray):
        maps = maps.combine_chunks()
    values_of = np.full(len(maps), np.nan)
    row, keys, numbers = _entries(maps)
    those = pc.equal(keys.cast(pa.string()), name).to_numpy(zero_copy_only=False)
    values_of[row[those]] = numbers[those]
    return values_of


class Faults(dict[str, str]):
    """Steps that failed, and why."""

    def add(self, name: str, error: Exception) -> None:
        self[name] = str(error)[:500]


def extend_reports(
    codes: Sequence[StepCode], pieces: Sequence[blocks.ReportPiece], known: node_columns.NodeColumns
) -> tuple[list[blocks.ReportPiece], Faults]:
    """The pieces with the metrics of all steps, in their order: a step sees those of the ones before."""
    faults = Faults()
    extended = list(pieces)
    for code in codes:
        try:
            step = load(code)
            if step.reports is None:
                continue
            calls = _RememberingCalls(step, extended, known) if step.memory else None
            for number, piece in enumerate(extended):
                values = calls.values(number) if calls else _values(step, step.reports, piece.rows())
                extended[number] = replace(piece, batch=with_metrics(piece.batch, values))
        except errors.MusterError as error:
            faults.add(code.name, error)
    return extended, faults


class _RememberingCalls:
    """Calls of a step with numbers for each machine: in the order of its reports, without repeated ones."""

    def __init__(
        self, step: Step, pieces: Sequence[blocks.ReportPiece], known: node_columns.NodeColumns
    ) -> None:
        self._step = step
        self._pieces = pieces
        self._places = known.places([piece.batch.column("machine") for piece in pieces])
        self._data = known.data
        self._former, self._boot, self._latest = (
            known.data[name].copy() for name in ("former_boot", "boot", "sequence")
        )

    def values(self, number: int) -> dict[str, Floats]:
        rows, place = self._pieces[number].rows(), self._places[number]
        boot, sequence = (rows.column(name).to_numpy() for name in ("boot", "sequence"))
        figures: dict[str, Floats] = {}
        turn = np.empty(len(place), np.int64)
        turn[np.lexsort((sequence, boot))] = np.arange(len(place))
        for round_ in node_columns.split_rounds(place, turn):
            at = np.arange(len(place))[round_]
            restarted = boot[at] != self._boot[place[at]]
            later = sequence[at] > self._latest[place[at]]
            at = at[np.where(restarted, boot[at] != self._former[place[at]], later)]
            machines = place[at]
            restarted = boot[at] != self._boot[machines]
            self._former[machines[restarted]] = self._boot[machines[restarted]]
            self._boot[machines], self._latest[machines] = boot[at], sequence[at]
            if len(at):
                for name, values in self._called(rows.take(pa.array(at)), machines).items():
                    figures.setdefault(name, np.full(len(place), np.nan))[at] = values
        return figures

    def _called(self, rows: pa.RecordBatch, machines: node_columns.Ints) -> dict[str, Floats]:
        columns_ = {key: self._data[self._step.column(key)] for key in self._step.memory}
        memory = {key: column[machines] for key, column in columns_.items()}
        function, count = self._step.reports, len(machines)
        assert function is not None

        def call() -> tuple[dict[str, Floats], dict[str, Floats]]:
            values = _checked(self._step, function(rows, memory), count)
            return values, _checked(self._step, {key: memory.get(key) for key in columns_}, count)

        values, changed = _limited(self._step.name, call)
        for key, numbers in changed.items():
            columns_[key][machines] = numbers
        return values


def extend_groups(codes: Sequence[StepCode], totals: Sequence[rollups.ScopeTotals]) -> Faults:
    """Add the metrics of all steps to groups, zones and the system."""
    faults = Faults()
    for code in codes if totals else ():
        try:
            step = load(code)
            if step.groups is None:
                continue
            for name, values in _values(step, step.groups, rollup_rows.rows(totals)).items():
                for table, positions, rows in rollups.by_table(totals):
                    there = np.isfinite(values[positions])
                    value = values[positions[there]]
                    figures = np.stack([np.ones(len(value)), value, value, value])
                    table.add_figures(rows[there], np.zeros(len(value), np.int64), figures, [name])
        except errors.MusterError as error:
            faults.add(code.name, error)
    return faults


def run(path: str, rows: pa.Table | Sequence[Mapping[str, Any]]) -> dict[str, Floats]:
    """The metrics of a step: a value for each row of the table `nodes`, or of `groups` if the rows have no
    ``machine``.

    Rows may lack columns.  `StepFailed` if the step fails; the cause is the error of its function.
    """
    (code,) = read((path,))
    step = load(code)
    names = rows.schema.names if isinstance(rows, pa.Table) else {name for row in rows for name in row}
    kind = tables.NODES if "machine" in names else tables.GROUPS
    given = rows if isinstance(rows, pa.Table) else _table(kind, rows)
    function = step.reports if kind == tables.NODES else step.groups
    if function is None:
        raise errors.InvalidInput(f"steps: {step.name!r} has no function for rows of {kind}")
    if kind == tables.GROUPS:
        return _values(step, function, _completed(given, tables.definition(kind).row_schema))
    piece = blocks.ReportPiece.from_rows(_completed(given, tables.definition(kind).row_schema))
    if not step.memory:
        return _values(step, function, piece.rows())
    known = node_columns.NodeColumns(
        {**node_columns.COLUMNS, **{name: (np.float64, start) for name, start in memory_columns((code,))}}
    )
    return _RememberingCalls(step, [piece], known).values(0)


def _table(kind: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    schema = tables.definition(kind).schema
    names = [name for name in schema.names if any(name in row for row in rows)]
    return pa.Table.from_pylist(
        [{**row, "metrics": list(dict(row.get("metrics") or {}).items())} for row in rows],
        schema=pa.schema(
            [schema.field(name).with_nullable(True) for name in dict.fromkeys([*names, "metrics"])]
        ),
    )


def _completed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """All columns of a schema: those that are missing have nulls or zeros; sequences are numbers of rows."""
    arrays = []
    for field_ in schema:
        if field_.name in rows.schema.names:
            array = rows.column(field_.name).combine_chunks()
            if pa.types.is_map(field_.type) and not array.type.equals(field_.type):
                array = pa.MapArray.from_arrays(array.offsets, array.keys.dictionary_encode(), array.items)
        elif field_.nullable:
            array = pa.nulls(rows.num_rows, field_.type)
        elif pa.types.is_string(field_.type):
            array = pa.array([""] * rows.num_rows)
        else:
            array = pa.array(np.arange(rows.num_rows) * (field_.name == "sequence"))
        arrays.append(array.cast(field_.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def with_metrics(batch: pa.RecordBatch, figures: Mapping[str, Floats]) -> pa.RecordBatch:
    """Reports, as `blocks.PIECE_SCHEMA`, with these metrics in place of those of the same names."""
    if not figures:
        return batch
    arrays = list(batch.columns)
    others = {name: values for name, values in figures.items() if name not in cells.METRICS}
    for name in figures.keys() - others:
        arrays[batch.schema.get_field_index(name)] = pa.array(figures[name], mask=~np.isfinite(figures[name]))
    if others:
        place = batch.schema.get_field_index(columns.EXTRA)
        row, keys, numbers = _entries(batch.column(place))
        names = keys.dictionary
        replaced = pc.is_in(names, value_set=pa.array(list(others))).to_numpy(zero_copy_only=False)
        code = keys.indices.to_numpy()
        kept = ~replaced[code]
        parts = [(row[kept], code[kept], numbers[kept])]
        for number, values in enumerate(others.values(), len(names)):
            there = np.flatnonzero(np.isfinite(values))
            parts.append((there, np.full(len(there), number), values[there]))
        row, code, numbers = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(row, kind="stable")
        ends = np.cumsum(np.bincount(row, minlength=batch.num_rows))
        arrays[place] = pa.MapArray.from_arrays(
            pa.array(np.r_[0, ends].astype(np.int32)),
            pa.DictionaryArray.from_arrays(
                pa.array(code[order].astype(np.int32)), pa.concat_arrays([names, pa.array(list(others))])
            ),
            pa.array(numbers[order]),
        )
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _entries(maps: pa.MapArray) -> tuple[node_columns.Ints, pa.DictionaryArray, Floats]:
    """The entries of maps: row, key and number, NaN for null."""
    starts = maps.offsets.to_numpy()
    row = np.repeat(np.arange(len(maps)), np.diff(starts))
    span = int(starts[0]), len(row)
    keys = maps.keys.slice(*span)
    keys = keys if pa.types.is_dictionary(keys.type) else keys.dictionary_encode()
    return row, keys, maps.items.slice(*span).to_numpy(zero_copy_only=False)


def _values(step: Step, function: Callable[..., Any], rows: Any) -> dict[str, Floats]:
    return _limited(step.name, lambda: _checked(step, function(rows), rows.num_rows))


def _checked(step: Step, answer: Any, rows: int) -> dict[str, Floats]:
    """Raises whatever the objects raise that a step returned."""
    if not isinstance(answer, Mapping) or len(answer) > METRICS_MAX:
        raise StepFailed(
            f"{step.name} returned {type(answer).__name__}: expected up to {METRICS_MAX} metrics"
        )
    checked = {}
    for name, values in answer.items():
        if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX:
            raise StepFailed(f"{step.name} returned a metric of the name {name!r:.60}: expected a text")
        name.encode()  # Arrow and MessagePack refuse what is no Unicode text
        try:
            numbers = _array(values)
        except (TypeError, ValueError, pa.ArrowException) as error:
            raise StepFailed(
                f"{step.name} returned {name} with values that are no numbers: {error}"
            ) from error
        if numbers.shape != (rows,):
            raise StepFailed(f"{step.name} returned {name} with shape {numbers.shape}: expected ({rows},)")
        numbers[np.abs(numbers) > columns.VALUE_MAX] = np.nan
        checked[name] = numbers
    return checked


def _array(values: Any) -> Floats:
    """A copy."""
    if isinstance(values, pa.ChunkedArray):
        values = values.to_numpy()
    elif isinstance(values, pa.Array):
        values = values.to_numpy(zero_copy_only=False)
    elif isinstance(values, np.ma.MaskedArray):
        values = np.ma.filled(values.astype(np.float64), np.nan)
    return np.array(values, np.float64)


_overdue: dict[str, threading.Thread] = {}  # by step: a call that takes too long


def _limited(name: str, function: Callable[[], T]) -> T:
    """The result of a call. One that takes too long is left behind in its thread, and no other call is made
    until it has ended."""
    if name in _overdue and _overdue[name].is_alive():
        raise StepFailed(f"{name} is skipped: an earlier call has not returned yet")
    answers: list[T] = []
    faults: list[BaseException] = []

    def call() -> None:
        try:
            answers.append(function())
        except BaseException as error:  # noqa: BLE001 (whatever it raises, the pipeline goes on)
            faults.append(error)

    thread = threading.Thread(target=call, name=f"step {name}", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    if thread.is_alive():
        _overdue[name] = thread
        raise StepFailed(f"{name} took longer than {LIMIT_S:g} s")
    for fault in faults:
        if isinstance(fault, StepFailed):
            raise fault
        raise StepFailed(f"{name} failed: {_described(fault)}") from fault
    return answers[0]


def _described(error: BaseException) -> str:
    """As text that can be encoded, whatever the error is."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 (its own text may fail, too)
        text = type(error).__name__
    return text.encode("utf-8", "backslashreplace").decode()
