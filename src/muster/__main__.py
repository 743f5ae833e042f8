"""``python -m muster``."""

from muster.cli import main

main.main()
