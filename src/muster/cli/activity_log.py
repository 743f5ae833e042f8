"""Records commands in the domain's activity log, with their outcome: done, refused or failed.

A command that changes something declares its action and target, with placeholders for its arguments:
``acts=("purge", "queue:{queue}")``.  Not recorded here: operations that the registry records itself (such as
`muster apply`), and messages, which are traffic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command

if TYPE_CHECKING:
    from muster.core import messages


@contextlib.contextmanager
def recorded(context: click.Context, what: str, target: str, when: str = "") -> Iterator[None]:
    """``when``: the argument without which the command only reads."""
    from muster.core import errors, messages

    if when and context.params[when] is None:
        yield
        return
    about = target.format(**{name: _plain(value) for name, value in context.params.items()})
    try:
        yield
    except errors.MusterError as error:
        if not isinstance(error, errors.Unavailable) or isinstance(error, errors.TimedOut):
            with contextlib.suppress(
                errors.MusterError, OSError
            ):  # the error of the command itself takes precedence
                _record(context, what, about, error.message, messages.DecisionOutcome.of(error))
        raise
    except OSError as error:
        with contextlib.suppress(errors.MusterError, OSError):
            _record(context, what, about, str(error), messages.DecisionOutcome.FAILED)
        raise
    except KeyboardInterrupt:  # nothing can be sent any more, but a file can be written
        if "servers" not in context.params:
            with contextlib.suppress(errors.MusterError, OSError):
                _record(context, what, about, "interrupted", messages.DecisionOutcome.IN_DOUBT)
        raise
    try:
        _record(context, what, about, "", messages.DecisionOutcome.DONE)
    except (errors.MusterError, OSError) as error:
        command.invocation_of(context).printer.note(f"not recorded in the activity log: {error}")


def _record(
    context: click.Context, what: str, target: str, why: str, outcome: messages.DecisionOutcome
) -> None:
    from muster.app import home, identities
    from muster.app.operations import audit
    from muster.cli import connection
    from muster.cli.domain import config

    invocation = command.invocation_of(context)
    if "servers" not in context.params:  # the command operates on the home itself
        folder = home.DomainFolder(config.load(invocation).domain.folder).root
        audit.append_entry(folder, audit.audit_entry(identities.ADMINISTRATOR, what, target, why, outcome))
        return
    to = connection.ConnectionOptions(
        **{name: context.params[name] for name in ("servers", "creds", "ca", "locator")}
    )

    async def publish() -> None:
        async with await connection.connect(invocation, to) as bus:
            await audit.publish_entry(bus, audit.audit_entry(bus.identity, what, target, why, outcome))

    command.run(publish())


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_plain, value))
    return "" if value is None else str(value)
