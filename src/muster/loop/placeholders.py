"""Placeholders in the values of rules: ``{name}`` is replaced by the value of that name.

Values come from outside, such as a group's name in an alert. So the template is read once, and an inserted
value is never expanded: a placeholder in a value stays the text that it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Value = str | int | float | bool

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def fill(template: str, values: Mapping[str, object]) -> str:
    """Braces around a word that is no name of ``values`` stay."""
    return _PLACEHOLDER.sub(lambda match: str(values.get(match[1], match[0])), template)


def fill_all(templates: Mapping[str, Value], values: Mapping[str, object]) -> dict[str, Value]:
    """Numbers and truth values stay as they are."""
    return {
        name: fill(template, values) if isinstance(template, str) else template
        for name, template in templates.items()
    }
