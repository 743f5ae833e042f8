"""Typed values as plain ones with every field, for output that people and programs read.

Messages omit fields at their default on the wire (``omit_defaults``). In JSON output and in the REST API all
fields are present, so that a reader needs no list of defaults.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any

import msgspec


def builtins(value: Any) -> Any:
    """Dicts, lists, strings and numbers: as `msgspec.to_builtins`, but with the fields at their default."""
    if isinstance(value, msgspec.Struct):
        config = type(value).__struct_config__
        kind = {} if config.tag is None else {str(config.tag_field): config.tag}
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        return kind | {encoded: builtins(getattr(value, name)) for encoded, name in names}
    if isinstance(value, Mapping):
        return {str(msgspec.to_builtins(key, str_keys=True)): builtins(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [builtins(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None  # JSON has no other numbers
    if isinstance(value, str | int | None) and not isinstance(value, enum.Enum):
        return value
    return msgspec.to_builtins(value, enc_hook=str)
