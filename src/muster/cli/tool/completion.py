"""Completion scripts, as click makes them from the commands themselves."""

from __future__ import annotations

import sys

import click

from muster.cli import command

_WHERE = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc",
    "fish": "~/.config/fish/completions/muster.fish",
}


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster completion bash >> ~/.bashrc", ""),
        ("muster completion zsh >> ~/.zshrc", ""),
        ("muster completion fish > ~/.config/fish/completions/muster.fish", ""),
    ],
)
@click.argument("shell", type=click.Choice(list(_WHERE)))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    It counts in shells that are started from then on. That of zsh comes after its `compinit`.
    """
    import click.shell_completion

    from muster.cli import main

    kind = click.shell_completion.get_completion_class(shell)
    assert kind is not None
    # The class's own check of the installed shell's version is for running, not for printing.
    script = kind(main.muster, {}, "muster", main.COMPLETION_VARIABLE)
    sys.stdout.write(kind.source_template % script.source_vars() + "\n")
