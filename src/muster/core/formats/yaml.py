"""YAML and JSON files as plain values; every fault is the same kind of error.

The time that the library needs grows with the square of the nesting of brackets, so the nesting is limited.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from muster.core import errors

if TYPE_CHECKING:
    import yaml

DEPTH_MAX = 100


@functools.cache
def loader() -> type[yaml.SafeLoader]:
    """A safe loader with limited nesting."""
    import yaml  # imported here: the import takes longer than most commands

    class BoundedLoader(yaml.SafeLoader):
        def fetch_flow_collection_start(self, TokenClass: Any) -> None:
            if self.flow_level >= DEPTH_MAX:
                raise yaml.scanner.ScannerError(
                    None, None, f"brackets are nested deeper than {DEPTH_MAX}", self.get_mark()
                )
            super().fetch_flow_collection_start(TokenClass)

        def scan_flow_scalar(self, style: str) -> Any:
            token = super().scan_flow_scalar(style)
            try:  # JSON writes a character beyond U+FFFF as two escapes
                token.value = token.value.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                raise yaml.scanner.ScannerError(
                    None, None, "half of a surrogate pair is not a character", token.start_mark
                ) from None
            return token

    return BoundedLoader


def read(text: str, source: str) -> Any:
    import yaml

    try:
        return yaml.load(text, Loader=loader())
    # Besides its own, what its constructors meet in values they cannot make: a 13th month, 5,000 digits.
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        raise errors.InvalidInput(f"{source}: not YAML: {str(error)[:300]}") from error
