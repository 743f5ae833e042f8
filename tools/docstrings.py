"""Docstrings for the documentation site (an extension of griffe, see mkdocs.yml).

Docstrings are Markdown, except that their examples are sessions of Python. A session becomes a block of code.
"""

from __future__ import annotations

import re

import griffe

SESSION = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """The docstring with each session in a block of code, in Markdown."""
    return SESSION.sub(lambda session: f"```pycon\n{session[0]}\n```", docstring)


class SessionsAsCode(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
