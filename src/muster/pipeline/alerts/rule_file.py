"""The file of the setting ``pipeline.rules``: alert rules, and the contacts of their notifications."""

from __future__ import annotations

from muster.core import errors, files
from muster.pipeline import settings as settings_
from muster.pipeline.alerts import notifications, rules


def load(
    settings: settings_.PipelineSettings,
) -> tuple[tuple[rules.AlertRule, ...], dict[str, notifications.AlertContact]]:
    """The rules, and the contacts that they name. Blocks."""
    if not settings.rules:
        return (), {}
    path = files.expanded(settings.rules)
    known = rules.load(path)
    contacts = notifications.load(path, settings)
    for rule in known:
        for name in rule.notify:
            if name not in contacts:
                raise errors.InvalidInput(
                    f"{path}: the rule {rule.name!r} notifies {name!r}, which is not defined"
                )
    return known, contacts
