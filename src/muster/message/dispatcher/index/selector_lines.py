"""The lines of a queue: one for each selector of its consumers, and one for those without a selector."""

from __future__ import annotations

from collections.abc import Iterator

from muster.message import messages, selectors
from muster.message.dispatcher.index import lines, sorted_numbers

# Lines of selectors without consumers that are kept, for clients that open a consumer for each message.
UNUSED_MAX = 8


class SelectorLines:
    """``waiting``: all waiting messages, which are the line of consumers without a selector."""

    def __init__(self, waiting: lines.PriorityNumbers) -> None:
        self.plain = lines.SelectorLine(None, waiting)
        self._lines: dict[str | None, lines.SelectorLine] = {None: self.plain}
        self._selectors = selectors.SelectorIndex[str]()

    def __iter__(self) -> Iterator[lines.SelectorLine]:
        return iter(self._lines.values())

    def __getitem__(self, selector: str | None) -> lines.SelectorLine:
        return self._lines[selector]

    def get(self, selector: str) -> lines.SelectorLine | None:
        return self._lines.get(selector)

    def matching(self, meta: messages.MessageMeta) -> list[lines.SelectorLine]:
        """The lines whose selectors accept a message; not that without a selector."""
        if not len(self._selectors):
            return []
        return [self._lines[selector] for selector in self._selectors.matching(meta)]

    def unscanned(self) -> lines.SelectorLine | None:
        """A line whose selector has to be compared with earlier messages."""
        if not len(self._selectors):
            return None
        return next((line for line in self if line.unscanned and line.users), None)

    def use(self, selector: str | None, position: int) -> None:
        """A consumer is attached. A new selector has to be compared with the messages up to ``position``."""
        line = self._lines.get(selector)
        if line is None and selector is not None:
            line = self._lines[selector] = lines.SelectorLine(selector, lines.PriorityNumbers())
            line.unscanned = position
            self._selectors.add(selector, selector)
        assert line is not None
        line.users += 1

    def leave(self, line: lines.SelectorLine) -> list[lines.SelectorLine]:
        """A consumer is detached; returns the lines that are dropped. One without consumers is kept for a
        while, unless it is incomplete.
        """
        line.users -= 1
        if line.users or line.selector is None:
            return []
        if line.unscanned:
            return [self._drop(line.selector)]
        self._lines[line.selector] = self._lines.pop(line.selector)  # the least recently used are first
        unused = [selector for selector, other in self._lines.items() if selector and not other.users]
        return [self._drop(selector) for selector in unused[:-UNUSED_MAX]]

    def clear(self) -> list[lines.SelectorLine]:
        """Forget all messages; returns the lines that are dropped, which have no consumers."""
        for line in self:
            line.numbers.clear()
            line.unscanned = 0
        return [self._drop(line.selector) for line in list(self) if line.selector and not line.users]

    def _drop(self, selector: str) -> lines.SelectorLine:
        self._selectors.remove(selector)
        return self._lines.pop(selector)

    def retain_only(self, pending: sorted_numbers.SortedNumbers) -> None:
        """Free the lines of messages that are done, which are otherwise removed when they are first."""
        for line in self:
            if line.selector is not None:
                for level, number in list(line.numbers.items()):
                    if number not in pending:
                        line.numbers.discard(level, number)
