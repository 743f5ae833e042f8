"""``muster schema``: JSON Schema and examples of the files that people write."""

from __future__ import annotations

import json
import sys

import click

from muster.cli import command

FORMATS = ("manifest", "rules", "responses", "reactions")


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster schema > manifest.schema.json", "for the YAML extension of an editor"),
        ("muster schema reactions --example", "a complete file to start with"),
    ],
)
@click.argument("name", metavar="[FORMAT]", type=click.Choice(FORMATS), default="manifest")
@click.option("--example", is_flag=True, help="Print a complete example instead.")
@command.pass_invocation
def schema(invocation: command.Invocation, name: str, example: bool) -> None:
    """Print the JSON Schema of a file format.

    FORMAT is manifest (the default), rules, responses or reactions.
    """
    from muster.app import file_formats

    if example:
        sys.stdout.write(file_formats.FORMATS[name].example)
    elif invocation.output == "yaml":
        invocation.printer.facts(file_formats.schema(name))
    else:
        sys.stdout.write(json.dumps(file_formats.schema(name), indent=2, ensure_ascii=False) + "\n")
