"""The sections of the settings for responses to alerts and for reactions of resources."""

from __future__ import annotations

from typing import Annotated

from muster.core.settings import sections


class ResponderSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """How the domain responds to its alerts."""

    rules: Annotated[
        sections.FilePath,
        sections.field_doc(
            "The file of response rules: which alert sends which event to which receivers. Empty: none."
        ),
    ] = ""
    max_age_s: Annotated[
        float,
        sections.field_doc(
            "Alerts older than this when the responder reads them, after an outage, get no response. "
            "Judged by the brokers' clock: more than its difference from the clocks of the fleet.",
            gt=0,
        ),
    ] = 3600.0


class ReactionSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """How managed resources react to events."""

    rules: Annotated[
        sections.FilePath,
        sections.field_doc(
            "The file of reactions: which resources are receivers, which events they accept, and which "
            "operations these execute. Empty: none. If several machines run the domain, set it on one."
        ),
    ] = ""
