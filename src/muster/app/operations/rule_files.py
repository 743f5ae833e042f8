"""Checks of the files that settings name: alert rules, responses and reactions."""

from __future__ import annotations

from collections.abc import Callable

from muster.app import settings as app_settings
from muster.core import errors, files
from muster.loop import reaction_rules, response_rules
from muster.pipeline.alerts import notifications

KEYS = "pipeline.rules", "responder.rules", "reactions.rules"


def check(settings: app_settings.Settings) -> list[str]:
    """The files, if all of them are valid; otherwise `errors.InvalidInput` with the first error. Blocks."""
    notifications.load_rules(settings.pipeline)
    _check("responder.rules", settings.responder.rules, response_rules.load)
    _check("reactions.rules", settings.reactions.rules, reaction_rules.load)
    named = settings.pipeline.rules, settings.responder.rules, settings.reactions.rules
    return [name for name in named if name]


def _check(key: str, name: str, load: Callable[[str], object]) -> None:
    if not name:
        return
    try:
        load(files.expanded(name).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise errors.InvalidInput(f"{key}: cannot read {name!r}: {error}") from error
    except errors.InvalidInput as error:
        raise errors.InvalidInput(f"{name}: {error.message}", hint=error.hint) from error
