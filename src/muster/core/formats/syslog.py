"""Messages of syslog (RFC 5424), and their framing on streams (RFC 6587, RFC 5425). Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

VERSION = 1
NIL = "-"
ENTERPRISE = "muster@32473"  # the number that is reserved for examples: we have none of our own
TEXT_BYTES_MAX = 8_192

SEVERITIES = {"error": 3, "warning": 4, "notice": 5, "info": 6}
FACILITIES = {
    "user": 1,
    "daemon": 3,
    "auth": 4,
    "authpriv": 10,
    "audit": 13,
    **{f"local{number}": 16 + number for number in range(8)},
}


def message(
    *,
    facility: str,
    severity: str,
    at_ms: int,
    host: str,
    application: str,
    process: str,
    kind: str,
    data: Mapping[str, str],
    text: str,
) -> bytes:
    """One message, without framing. ``kind`` is its MSGID, ``data`` its structured data."""
    priority = FACILITIES[facility] * 8 + SEVERITIES[severity]
    moment = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
    header = (
        f"<{priority}>{VERSION}",
        moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        _name(host, 255),
        _name(application, 48),
        _name(process, 128),
        _name(kind, 32),
        _structured(data),
    )
    line = "".join(character if character.isprintable() else " " for character in text)
    body = line.encode("utf-8", "replace")[:TEXT_BYTES_MAX]
    return (
        " ".join(header).encode("utf-8", "replace")
        + b" \xef\xbb\xbf"
        + body.decode("utf-8", "ignore").encode()
    )


def framed(data: bytes) -> bytes:
    """A message on a stream: its length in front of it, so that it may contain any character."""
    return b"%d " % len(data) + data


def _name(text: str, length_max: int) -> str:
    return "".join(character for character in text if "!" <= character <= "~")[:length_max] or NIL


def _structured(data: Mapping[str, str]) -> str:
    if not data:
        return NIL
    parameters = (f'{_parameter(name)}="{_escaped(value)}"' for name, value in data.items())
    return f"[{ENTERPRISE} {' '.join(parameters)}]"


def _parameter(name: str) -> str:
    return "".join(character for character in name if "!" <= character <= "~" and character not in '="]')[:32]


def _escaped(value: str) -> str:
    value = "".join(character if character.isprintable() else " " for character in value)
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("]", "\\]")
