"""Output formats: ``table`` and ``wide`` for people, ``json`` and ``yaml`` for programs.

A command passes typed rows or plain values (dicts, lists, strings, numbers).  Output for programs carries all
fields with exact values; tables show columns in units for people (`cell_texts`).  The elements of a stream
are printed as one JSON object per line, one YAML document each, or one line of text.
Colours and spinners appear only on a terminal, and never if ``NO_COLOR`` is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from muster.cli import tables
from muster.core.formats import cell_texts

if TYPE_CHECKING:
    import msgspec
    import rich.console
    import rich.table
    import rich.text

    Record = Mapping[str, Any] | msgspec.Struct

FORMATS = ("table", "wide", "json", "yaml")


def supports_color(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _harmless(text: str) -> str:
    """Escape control characters, which could manipulate the terminal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def for_stream(text: str, stream: TextIO) -> str:
    """``text``, which may come from elsewhere, for a terminal or as it is."""
    return _harmless(text) if stream.isatty() else text


def _plain(value: Any) -> Any:
    """Typed rows as plain values with all fields."""
    from muster.core.formats import complete

    return complete.builtins(value)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_STYLES = {
    "up": "green",
    "running": "green",
    "valid": "green",
    "ok": "green",
    "warning": "yellow",
    "fault": "red",
    "starting": "yellow",
    "restarting": "yellow",
    "draining": "yellow",
    "stopping": "yellow",
    "late": "yellow",
    "unknown": "yellow",
    "expired": "yellow",
    "failed": "red",
    "completed": "green",
    "down": "red",
    "revoked": "red",
    "unresponsive": "red",
    "stopped": "dim",
}


def _styled(text: str) -> rich.text.Text:
    import rich.text

    return rich.text.Text(text, style=_STYLES.get(text, ""))


class Printer:
    def __init__(self, form: str) -> None:
        self.form = form

    @property
    def for_people(self) -> bool:
        return self.form in ("table", "wide")

    def shows_progress(self, stream: TextIO) -> bool:
        return self.for_people and supports_color(stream)

    def _console(self, stream: TextIO) -> rich.console.Console:
        import rich.console

        # Without a terminal no line is wrapped, for grep and awk.
        wraps = stream.isatty() and self.form != "wide"
        return rich.console.Console(
            file=stream,
            width=None if wraps else 10_000,
            no_color=not supports_color(stream),
            highlight=False,
            soft_wrap=not wraps,
            markup=False,
            emoji=False,
        )

    def _dump(self, value: Any) -> None:
        text = json.dumps(_plain(value), indent=2, ensure_ascii=False, default=str)
        if self.form == "json":
            sys.stdout.write(text + "\n")
        else:
            import yaml

            # Through JSON, so that both formats carry the same: the YAML writer rejects unknown types.
            yaml.safe_dump(json.loads(text), sys.stdout, sort_keys=False, allow_unicode=True)

    def rows(
        self,
        rows: Sequence[Record],
        columns: Sequence[str],
        *,
        of: str = "",
        empty: str = "",
        expands: bool = False,
        measured: Collection[str] | None = None,
    ) -> None:
        """Print a list. A table shows ``columns``; json and yaml carry all fields.

        A column whose name ends with ``?`` is shown if there is room for it, and with ``-o wide``. ``of``
        replaces the title of the first column; ``empty`` is printed for an empty list. ``expands``: if the
        columns do not fit, each row is printed as a list of its values. ``measured``: the columns whose names
        mean a unit (default: all); the others are names and values of the user, and shown as they are.
        """
        if not self.for_people:
            self._dump(list(rows))
        elif not rows:
            if empty:
                self.note(empty)
        else:
            values = [_plain(row) for row in rows]
            names = [column.removesuffix("?") for column in columns]
            titles = [cell_texts.title(name).upper() for name in (of or columns[0], *columns[1:])]
            own = set() if measured is None else {name for name in names if name not in measured}
            titles = [name if name in own else title for name, title in zip(names, titles, strict=True)]
            cells = [[value.get(name) for name in names] for value in values]
            self._table(titles, columns, cells, expands=expands, own=own)

    def facts(self, facts: Record) -> None:
        """Print an object as names and values."""
        if not self.for_people:
            self._dump(facts)
            return
        shown = {name: value for name, value in _plain(facts).items() if value not in (None, "", [], {})}
        titles = cell_texts.titles(shown)
        self._pairs(
            (titles[name], _harmless(cell_texts.cell(name, value)))
            for name, value in shown.items()
            if name in titles
        )

    def _pairs(self, pairs: Iterable[tuple[str, str]]) -> None:
        import rich.table

        table = rich.table.Table(box=None, show_header=False, pad_edge=False, padding=(0, tables.GAP, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for title, text in pairs:
            table.add_row(title, _styled(text))
        self._show(table)

    def _table(
        self,
        titles: Sequence[str],
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        *,
        expands: bool,
        own: Collection[str],
    ) -> None:
        import rich.cells
        import rich.table

        names = [column.removesuffix("?") for column in columns]
        cells = [
            [
                _harmless(cell_texts.cell("" if name in own else name, value))
                for name, value in zip(names, row, strict=True)
            ]
            for row in rows
        ]
        widths = [max(map(rich.cells.cell_len, texts)) for texts in zip(*cells, strict=True)]
        widths = [width and max(width, len(text)) for width, text in zip(widths, titles, strict=True)]
        room = self._console(sys.stdout).width if sys.stdout.isatty() and self.form != "wide" else None
        words = [tables.longest_word(texts) for texts in zip(*cells, strict=True)]
        if expands and room is not None and not tables.fits(columns, widths, words, room):
            unique = cell_texts.titles(name for name in names if name not in own)
            for number, row in enumerate(cells, 1):
                sys.stdout.write(f"-- row {number} ".ljust(tables.RULE, "-") + "\n")
                self._pairs(
                    (unique.get(name, name), text)
                    for name, text, width in zip(names, row, widths, strict=True)
                    if width
                )
            self.note("the columns are wider than the terminal: one line for each (-o wide: as a table)")
            return
        chosen = tables.choose(columns, widths, words, room)
        table = rich.table.Table(box=None, pad_edge=False, padding=(0, tables.GAP, 0, 0))
        for index, width in chosen.items():
            right = cell_texts.is_numeric([row[index] for row in rows])
            table.add_column(
                titles[index],
                header_style="bold",
                width=width if room is not None else None,
                justify="right" if right else "left",
                overflow="fold",
            )
        for row in cells:
            table.add_row(*(_styled(row[index]) for index in chosen))
        self._show(table)
        hidden = [title for index, title in enumerate(titles) if widths[index] and index not in chosen]
        if hidden:
            line = f"not shown: {', '.join(hidden)} (-o wide)"
            self.note(line if room is None else textwrap.fill(line, room))

    def _show(self, table: rich.table.Table) -> None:
        console = self._console(sys.stdout)
        with console.capture() as captured:
            console.print(table)
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))

    def item(self, value: Record, line: str, *, lead: str = "", color: str | None = None) -> None:
        """Print an element of a stream and flush. ``line`` may contain untrusted text; ``lead`` comes before
        it, in a colour on a terminal."""
        if self.form == "json":
            sys.stdout.write(json.dumps(_plain(value), ensure_ascii=False, default=str) + "\n")
        elif self.form == "yaml":
            sys.stdout.write("---\n")
            self._dump(value)
        else:
            if lead and supports_color(sys.stdout):
                import click

                lead = click.style(lead, fg=color)
            sys.stdout.write(lead + for_stream(line, sys.stdout) + "\n")
        sys.stdout.flush()

    def done(self, facts: Record, sentence: str) -> None:
        """Print the result of an operation: a sentence for people, the facts for programs."""
        if self.for_people:
            sys.stdout.write(for_stream(sentence, sys.stdout) + "\n")
        else:
            self._dump(facts)
        sys.stdout.flush()  # a parent process may wait for this line of a service

    def note(self, text: str) -> None:
        """Print a message for people on stderr, apart from the data."""
        sys.stderr.write(for_stream(text, sys.stderr) + "\n")

    def stopping(self) -> None:
        """Print the message for Ctrl-C, below the ^C of the terminal."""
        self.note(("\n" if sys.stderr.isatty() else "") + "stopping… (press Ctrl-C again to force it)")

    def streaming(self, text: str) -> None:
        """Say on a terminal that a command prints what happens until it is interrupted."""
        if self.for_people and sys.stderr.isatty():
            self.note(f"{text}; Ctrl-C ends it")

    @contextlib.contextmanager
    def progress(self, text: str) -> Iterator[Callable[[str, float | None], None]]:
        """Show a progress bar. The caller reports the current step and the completed share; None: unknown.

        Silent without a terminal.
        """
        if not self.shows_progress(sys.stderr):
            yield lambda _, __: None
            return
        import rich.progress

        columns = (
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeElapsedColumn(),
        )
        with (
            _duplicate(sys.stderr) as stream,
            rich.progress.Progress(*columns, console=self._console(stream), transient=True) as shown,
        ):
            task = shown.add_task(text, total=1.0)

            def tell(step: str, share: float | None) -> None:
                description = f"{text}: {step}" if step else text
                if share is None:
                    shown.tasks[0].total = None  # a moving bar without a percentage
                shown.update(task, description=description, completed=share)

            yield tell

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show a spinner and the time that has passed; silent without a terminal."""
        if not self.shows_progress(sys.stderr):
            yield
            return
        import rich.progress

        columns = (
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.TimeElapsedColumn(),
        )
        with (
            _duplicate(sys.stderr) as stream,
            rich.progress.Progress(*columns, console=self._console(stream), transient=True) as shown,
        ):
            shown.add_task(text, total=None)
            yield


@contextlib.contextmanager
def _duplicate(stream: TextIO) -> Iterator[TextIO]:
    """The same terminal under another descriptor: it stays when the other is redirected (Spark's output)."""
    with open(os.dup(stream.fileno()), "w", encoding="utf-8", errors="backslashreplace") as duplicate:
        yield duplicate
