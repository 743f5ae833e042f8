"""What tests use of Debian's packages: a browser, and a peer.

``python -m tests.debian`` is a step of ``make test``: it says what is missing before anything is tried, and
installs it where root runs it.  Otherwise the tests are skipped, with the command to type.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

INSTALL_TIMEOUT_S = 600


@dataclass(frozen=True)
class DebianPackage:
    name: str
    what_for: str
    programs: tuple[str, ...]
    packages: tuple[str, ...]

    @property
    def is_here(self) -> bool:
        return all(shutil.which(program) for program in self.programs)

    @property
    def command(self) -> str:
        return f"apt-get install {' '.join(self.packages)}"

    def require(self) -> None:
        """Go on where it is here; otherwise skip the test, or fail it in CI."""
        from muster.testing import plugin  # not before pytest has loaded it: the root conftest imports us

        plugin.require_part(self.name, self.is_here, hint=f"{self.command} (needs root)")


BROWSER = DebianPackage(
    "Chromium", "the dashboard in a browser", ("chromium",), ("chromium", "fonts-dejavu-core")
)
WSL = DebianPackage(
    "wsl",
    "a peer's WS-Management client",
    ("wslid", "curl", "xmllint", "uuidgen"),
    ("wsl", "curl", "libxml2-utils", "uuid-runtime"),  # and what its package does not depend on
)
NETWORK = DebianPackage(
    "network namespaces", "hosts of the fault harness", ("ip", "nft", "tc"), ("iproute2", "nftables")
)
SHELLS = DebianPackage("zsh and fish", "completion in other shells", ("zsh", "fish"), ("zsh", "fish"))
PROMTOOL = DebianPackage(
    "promtool", "the queries of the dashboard for Grafana", ("promtool",), ("prometheus",)
)
ALERTMANAGER = DebianPackage(
    "Alertmanager", "webhooks like ours", ("prometheus-alertmanager",), ("prometheus-alertmanager",)
)
PODMAN = DebianPackage(
    "Podman", "containers", ("podman", "runc", "busybox"), ("podman", "runc", "busybox-static")
)
PARTS = (BROWSER, WSL, NETWORK, SHELLS, PROMTOOL, ALERTMANAGER, PODMAN)


def main() -> None:
    for part in PARTS:
        if part.is_here:
            continue
        may = os.geteuid() == 0 and shutil.which("apt-get") is not None
        then = "installing it as root" if may else "it needs root, so those tests are skipped"
        _say(f"missing: {part.name} ({part.what_for}; {part.command}): {then}")
        if may and not _install(part):
            _say(f"left out: {part.name} could not be installed")


def _install(part: DebianPackage) -> bool:
    """With the lists of packages as they are; with new ones if that fails."""
    return _apt("install", "-y", "--no-install-recommends", *part.packages) or (
        _apt("update") and _apt("install", "-y", "--no-install-recommends", *part.packages)
    )


def _apt(*words: str) -> bool:
    done = subprocess.run(
        ["apt-get", "-q", *words],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    return done.returncode == 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
