"""Output formats: ``table`` for people, ``json`` and ``yaml`` for programs.

A command passes plain values (dicts, lists, strings, numbers), so all formats carry the same data.  The
elements of a stream are printed as one JSON object per line, one YAML document each, or one line of text.
Colours and spinners appear only on a terminal, and never if ``NO_COLOR`` is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import rich.console

FORMATS = ("table", "json", "yaml")


def supports_color(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _plain(value: Any) -> str:
    """The text of a cell: empty for None, comma-separated for a list."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(item) for item in value)
    return str(value)


def _harmless(text: str) -> str:
    """Escape control characters, which could manipulate the terminal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


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
    "down": "red",
    "revoked": "red",
    "unresponsive": "red",
    "stopped": "dim",
}


def format_bytes(count_bytes: float) -> str:
    """Three significant digits and a unit."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count_bytes >= 1024 and len(units) > 1:
        count_bytes /= 1024
        del units[0]
    return f"{count_bytes:.0f} {units[0]}" if count_bytes >= 1000 else f"{count_bytes:.3g} {units[0]}"


class Printer:
    def __init__(self, form: str) -> None:
        self.form = form

    @property
    def for_people(self) -> bool:
        return self.form == "table"

    def _console(self, stream: TextIO) -> rich.console.Console:
        import rich.console

        # Without a terminal no line is wrapped, for grep and awk.
        return rich.console.Console(
            file=stream,
            width=None if stream.isatty() else 10_000,
            no_color=not supports_color(stream),
            highlight=False,
            soft_wrap=not stream.isatty(),
            markup=False,
            emoji=False,
        )

    def _dump(self, value: Any) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
        if self.form == "json":
            sys.stdout.write(text + "\n")
        else:
            import yaml

            # Through JSON, so that both formats carry the same: the YAML writer rejects unknown types.
            yaml.safe_dump(json.loads(text), sys.stdout, sort_keys=False, allow_unicode=True)

    def rows(
        self,
        rows: Sequence[Mapping[str, Any]],
        columns: Sequence[str],
        *,
        of: str = "",
        empty: str = "",
    ) -> None:
        """Print a list. A table shows ``columns``; json and yaml carry all keys.

        ``of`` replaces the title of the first column; ``empty`` is printed for an empty list.
        """
        if not self.for_people:
            self._dump([dict(row) for row in rows])
        elif not rows:
            if empty:
                self.note(empty)
        else:
            header = [column.replace("_", " ").upper() for column in (of or columns[0], *columns[1:])]
            self._table(header, [[row.get(column) for column in columns] for row in rows])

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Print an object as names and values."""
        if not self.for_people:
            self._dump(dict(facts))
            return
        shown = [
            [name.replace("_", " "), value] for name, value in facts.items() if value not in (None, [], {})
        ]
        self._table(None, shown)

    def _table(self, header: Sequence[str] | None, rows: Sequence[Sequence[Any]]) -> None:
        import rich.table
        import rich.text

        table = rich.table.Table(box=None, show_header=bool(header), pad_edge=False, padding=(0, 2, 0, 0))
        for index, title in enumerate(header or ("", "")):
            table.add_column(title, header_style="bold", style="bold" if header is None and not index else "")
        for row in rows:
            cells = [_plain(cell) for cell in row]
            table.add_row(*(rich.text.Text(cell, style=_STYLES.get(cell, "")) for cell in cells))
        console = self._console(sys.stdout)
        with console.capture() as captured:
            console.print(table)
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))

    def item(self, value: Mapping[str, Any], line: str) -> None:
        """Print an element of a stream and flush. ``line`` may contain untrusted text."""
        if self.form == "json":
            sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")
        elif self.form == "yaml":
            sys.stdout.write("---\n")
            self._dump(dict(value))
        else:
            sys.stdout.write((_harmless(line) if sys.stdout.isatty() else line) + "\n")
        sys.stdout.flush()

    def done(self, facts: Mapping[str, Any], sentence: str) -> None:
        """Print the result of an operation: a sentence for people, the facts for programs."""
        if self.for_people:
            sys.stdout.write(sentence + "\n")
        else:
            self._dump(dict(facts))
        sys.stdout.flush()  # a parent process may wait for this line of a service

    def note(self, text: str) -> None:
        """Print a message for people on stderr, apart from the data."""
        sys.stderr.write(text + "\n")

    def stopping(self) -> None:
        """Print the message for Ctrl-C, below the ^C of the terminal."""
        self.note(("\n" if sys.stderr.isatty() else "") + "stopping… (press Ctrl-C again to force it)")

    @contextlib.contextmanager
    def progress(self, text: str) -> Iterator[Callable[[str, float], None]]:
        """Show a progress bar. The caller reports the current step and the completed share.

        Silent without a terminal.
        """
        if not (self.for_people and supports_color(sys.stderr)):
            yield lambda _, __: None
            return
        import rich.progress

        columns = (
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeElapsedColumn(),
        )
        with rich.progress.Progress(*columns, console=self._console(sys.stderr), transient=True) as shown:
            task = shown.add_task(text, total=1.0)

            def tell(step: str, share: float) -> None:
                shown.update(task, description=f"{text}: {step}" if step else text, completed=share)

            yield tell

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show a spinner; silent without a terminal."""
        if not (self.for_people and supports_color(sys.stderr)):
            yield
            return
        with self._console(sys.stderr).status(text):
            yield
