"""YAML that people wrote, as plain values; whatever is wrong with it is one kind of error."""

from __future__ import annotations

from typing import Any

from muster.core import errors


def read(text: str, source: str) -> Any:
    import yaml  # imported here: the import takes longer than most commands

    try:
        return yaml.safe_load(text)
    # Besides its own, what its constructors meet in values they cannot make: a 13th month, 5,000 digits.
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        raise errors.InvalidInput(f"{source}: not YAML: {str(error)[:300]}") from error
