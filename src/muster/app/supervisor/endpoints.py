"""Where the servers of a domain listen: one socket, or a port that several processes share."""

from __future__ import annotations

import errno
import os
import socket
import sys
from dataclasses import dataclass

from muster.core import errors
from muster.core.net import hosts


def usable_cores() -> int:
    """The number of processes that are useful on this machine; one where ports cannot be shared."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens. ``or_any_port``: on a free port if another process uses this one.
    ``shared``: other servers may use the port too."""

    scheme: str
    host: str
    port: int
    or_any_port: bool = False
    shared: bool = False

    def listen(self) -> socket.socket:
        """Blocks."""
        try:
            listener = self._bind(share=self.shared)
            listener.listen(256)
        except OSError as error:
            raise self._unusable(error) from error
        listener.setblocking(False)
        return listener

    def reserve(self) -> socket.socket:
        """Bind the port without listening, for processes that share it: it remains ours while none of them
        listens. Blocks."""
        try:
            if not self.shared:  # fails if another process serves it, even one that shares it
                self._bind(share=False).close()
            return self._bind(share=True)
        except OSError as error:
            raise self._unusable(error) from error

    def url(self, listener: socket.socket) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{listener.getsockname()[1]}"

    def _bind(self, *, share: bool) -> socket.socket:
        made = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if share:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                made.bind((self.host, self.port))
            except OSError:
                if not self.port or not self.or_any_port:
                    raise
                made.bind((self.host, 0))
        except BaseException:
            made.close()
            raise
        return made

    def _unusable(self, error: OSError) -> errors.Unavailable:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror or error}"
        return errors.Unavailable(
            f"port {self.port} of {self.host} {why}", hint="choose another port, or 0 for a free one"
        )


def require_encryption(host: str, certificate: str, setting: str) -> None:
    """`errors.Refused` if passwords would be sent unencrypted."""
    if not certificate and not hosts.is_loopback(host):
        raise errors.Refused(
            f"passwords would be sent unencrypted on {host}", hint=f"configure {setting} and its key"
        )
