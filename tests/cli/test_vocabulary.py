"""One word order and one meaning of each option in all commands.

An option that several commands have takes the same kind of value everywhere, and has the same short form. The
exceptions are listed with their reasons; a new one has to be added here.
"""

from __future__ import annotations

import re
from collections import defaultdict

import click
import pytest

from muster.cli import command
from tools.reference import cli as reference

CONTEXTS = [
    context
    for context in reference.walk()
    if not isinstance(context.command, click.Group) or context.command.invoke_without_command
]

#: Options that have several meanings, and why.
EXCEPTIONS = {
    "-f": "--file or --follow",
    "--address": "URL of a broker; the address of an event",
    "--after": "the last key of a page; a version",
    "--as": "the identity of a participant; the kind of what is simulated",
    "--by": "columns of a query; the key of an authority",
    "--durable": "the name of a JMS subscription; events need none",
    "--from": "a time in the history; a sender in notifications",
    "--period": "a duration, except in `report capacity`: day, week or month",
    "--to": "a file for output; the address of an event; the target of a move",
}
SHORT = {
    "-a": "--attribute",
    "-d": "--detach",
    "-f": ("--file", "--follow"),  # as in kubectl: no command has both
    "-H": "--header",
    "-h": "--help",
    "-n": ("--limit", "--count", "--tail"),  # how many: rows of a list, messages of a stream, last lines
    "-o": "--output",
    "-p": "--property",
}
#: What another word would mean here; the right side is used instead.
REJECTED = {
    "--filter": "--where",
    "--selector": "--where",
    "--expression": "--where",
    "--max": "--limit",
    "--format": "--output",
    "--json": "--output json",
    "--quiet": "--output",
    "--ttl-s": "--ttl",
    "--expires": "--lifetime",
    "--out": "--to",
    "--output-file": "--to",
    "--count-max": "--limit",
    "--dry-run": "a command of its own, as `muster plan`",
    "--yes": "no command asks: what cannot be undone has a verb of its own",
    "--interval": "--period or --every",
}


def _options(context: click.Context) -> list[click.Option]:
    return [
        param
        for param in context.command.params
        if isinstance(param, click.Option) and param.name not in command.COMMON_NAMES
    ]


def _kind(option: click.Option) -> str:
    """What it takes: a flag, or the type of its value as the help page shows it."""
    if option.is_flag:
        return "flag"
    if isinstance(option.type, click.Choice):
        return "choice"
    if option.metavar:
        return re.sub(r"[^A-Z=:/\[\],…]", "", option.metavar)
    return re.sub(r" range$", "", option.type.name)


def test_an_option_takes_the_same_value_in_every_command():
    kinds: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for context in CONTEXTS:
        for option in _options(context):
            for name in (*option.opts, *option.secondary_opts):
                kinds[name][_kind(option)].append(context.command_path)
    differing = {name: dict(by_kind) for name, by_kind in kinds.items() if len(by_kind) > 1}
    assert differing.keys() == EXCEPTIONS.keys(), differing


def test_a_short_form_stands_for_one_option_and_is_not_missing_anywhere():
    long_with_short = {
        long for longs in SHORT.values() for long in ([longs] if isinstance(longs, str) else longs)
    }
    for context in CONTEXTS:
        for option in _options(context):
            short = [name for name in option.opts if not name.startswith("--")]
            long = next(name for name in option.opts if name.startswith("--"))
            for name in short:
                assert long in SHORT[name], f"{context.command_path} {name} {long}"
            assert short or long not in long_with_short - {"--file"}, f"{context.command_path}: {long}"


def test_no_option_has_a_second_name():
    names = {name for context in CONTEXTS for option in _options(context) for name in option.opts}
    assert not names & set(REJECTED)


def test_a_value_is_shown_by_its_meaning_not_by_its_type():
    """``N`` or ``NAME``; ``TEXT`` only where the text is free."""
    free = {"--description", "--prefix", "--reason", "--target"}
    shown = {
        (name, option.make_metavar(context))
        for context in CONTEXTS
        for option in _options(context)
        for name in option.opts
        if not option.is_flag and not option.hidden
    }
    assert {name for name, metavar in shown if metavar == "TEXT"} == free
    assert not {name for name, metavar in shown if re.search(r"INTEGER|%Y|RANGE$", metavar)}


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda context: context.command_path)
def test_arguments_have_the_same_order_and_spelling(context):
    """Names before what is done to them; a predicate is PREDICATE; lists are `[NAME]...`."""
    shown = [
        param.make_metavar(context) for param in context.command.params if isinstance(param, click.Argument)
    ]
    text = " ".join(shown)
    assert not re.search(r"\[[A-Z]+S\]\.\.\.|EXPR\b|EXPRESSION|QUERIES|SELECTOR", text), text
    operations = [number for number, word in enumerate(text.split()) if word == "OPERATION"]
    assert operations in ([], [len(text.split()) - 1]), text
    for option in _options(context):
        if option.opts == ["--where"]:
            assert option.metavar == "PREDICATE", context.command_path


def test_the_words_for_time_are_used_alike():
    """``--last``, ``--since``, ``--for``, ``--timeout``, ``--wait``, ``--lifetime``: durations everywhere."""
    for context in CONTEXTS:
        for option in _options(context):
            if {"--last", "--since", "--for", "--timeout", "--wait", "--lifetime", "--every", "--ttl"} & set(
                option.opts
            ):
                assert isinstance(option.type, command.DurationParam) or option.metavar == "DURATION", (
                    f"{context.command_path} {option.opts}"
                )
