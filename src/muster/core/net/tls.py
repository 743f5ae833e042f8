"""TLS contexts of listeners that follow their files.

A certificate is renewed by replacing its file.  A context reads its file only once and would use the old
certificate for ever; `RenewableTls.refresh`, called every `LOOK_S`, reads a replaced file.  New connections
then use the new certificate.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from muster.core.telemetry import log

events = log.EventLog("core")

LOOK_S = 30.0


def for_server(cert: Path | str, key: Path | str | None = None) -> ssl.SSLContext:
    """Without ``key``, the file of the certificate contains the key. Blocks."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return context


class RenewableTls:
    """A listener's context, and the files that its certificate and key come from."""

    def __init__(self, context: ssl.SSLContext, cert: Path | str, key: Path | str | None = None) -> None:
        self.context = context
        self._files = (cert, key)
        self._read: object = None

    def refresh(self) -> None:
        """Blocks briefly. Call it only in the thread of the listener: otherwise a handshake could use the new
        certificate with the old key."""
        cert, key = self._files
        try:
            states = [_state(file) for file in self._files if file is not None]
            if states != self._read:
                self.context.load_cert_chain(cert, key)
                self._read = states
        except (OSError, ssl.SSLError) as error:  # perhaps only one of two files has been replaced so far
            events.warning("certificate-not-read", file=str(cert), error=error)


def _state(file: Path | str) -> tuple[int, int, int]:
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns
