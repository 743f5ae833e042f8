"""``python -m muster``, and the ``muster`` command."""

from __future__ import annotations

import signal
from typing import NoReturn


def main() -> NoReturn:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is begun yet (`muster.cli.interrupts`)
    from muster.cli import main as cli

    cli.main()


if __name__ == "__main__":
    main()
