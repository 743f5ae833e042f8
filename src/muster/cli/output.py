"""How answers look: ``table`` for people, ``json`` and ``yaml`` for programs.

A command hands over plain values (dicts, lists, strings, numbers); nothing it prints exists in one form only.
Streams are one JSON object a line, one YAML document each, or one line of text.  Colour and spinners appear
only on a terminal, and never when ``NO_COLOR`` is set.
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
    """A cell: empty for nothing, comma-separated for a list."""
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
    """Without what would let a message take over the terminal it is shown on."""
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
    """For people: 3 figures and a unit."""
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

        # Away from a terminal nothing is wrapped: a line stays a line for grep and awk.
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

            # By way of JSON, so that both carry the same: YAML's writer refuses whatever it has no name for.
            yaml.safe_dump(json.loads(text), sys.stdout, sort_keys=False, allow_unicode=True)

    def rows(
        self,
        rows: Sequence[Mapping[str, Any]],
        columns: Sequence[str],
        *,
        of: str = "",
        empty: str = "",
    ) -> None:
        """A list of things. ``columns`` are what a table shows; json and yaml carry everything.

        ``of`` is the title of the first column where its name alone says too little; ``empty`` tells a person
        what an empty list means.
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
        """One thing, as names and values."""
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
        """One element of a stream, out at once. ``line`` may hold what others wrote."""
        if self.form == "json":
            sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")
        elif self.form == "yaml":
            sys.stdout.write("---\n")
            self._dump(dict(value))
        else:
            sys.stdout.write((_harmless(line) if sys.stdout.isatty() else line) + "\n")
        sys.stdout.flush()

    def done(self, facts: Mapping[str, Any], sentence: str) -> None:
        """The outcome of an act: a sentence for a person, the facts for a program."""
        if self.for_people:
            sys.stdout.write(sentence + "\n")
        else:
            self._dump(dict(facts))
        sys.stdout.flush()  # whoever serves goes on, and who started it waits for this

    def note(self, text: str) -> None:
        """Something for a person beside the answer: on stderr, so that it never mixes with data."""
        sys.stderr.write(text + "\n")

    def stopping(self) -> None:
        """Said at Ctrl-C, below the ^C that a terminal shows."""
        self.note(("\n" if sys.stderr.isatty() else "") + "stopping… (once more to force it)")

    @contextlib.contextmanager
    def progress(self, text: str) -> Iterator[Callable[[str, float], None]]:
        """A bar while something long is done; the caller tells what it is at, and which share is behind it.

        Silent away from a terminal.
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
        """A spinner while something takes its time; silent away from a terminal."""
        if not (self.for_people and supports_color(sys.stderr)):
            yield
            return
        with self._console(sys.stderr).status(text):
            yield
