"""The requests that notify webhooks: built-in formats, templates of other services, and headers. Pure.

docs/guides/alerts.md has examples.

``muster`` sends the alert as it is on the bus.  ``alertmanager`` sends what Alertmanager sends to its webhook
receivers (version 4), ``alertmanager-api`` what Prometheus sends to Alertmanager (``POST /api/v2/alerts``).

A ``body`` is a template: every text in it may contain the placeholders of `PLACEHOLDERS`, and
``{labels.NAME}``.  It is filled in before it is encoded as JSON, so values cannot change its structure.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from muster.core import errors, messages
from muster.pipeline.alerts import tracker

Format = Literal["muster", "alertmanager", "alertmanager-api"]
#: Text, or a reference to a secret, as {secret: "file:PATH"}, with an optional prefix: "Bearer ".
Text = str | dict[str, str]
ReadSecret = Callable[[str], str]

PLACEHOLDERS = (
    "id",
    "rule",
    "about",
    "kind",
    "name",
    "severity",
    "state",
    "summary",
    "value",
    "since",
    "at",
    "action",
)
_PLACEHOLDER = re.compile(r"\{([a-z]+(?:\.[A-Za-z0-9_.-]+)?)\}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}\Z")
_RESERVED = ("host", "content-length", "connection", "transfer-encoding")
_NEVER = "0001-01-01T00:00:00Z"
FIRING_S = 30 * 86400  # how long Alertmanager may consider an alert firing without hearing of it


def text_of(text: Text, read: ReadSecret) -> str:
    """The text, or the secret that it refers to."""
    if isinstance(text, str):
        return text
    if not text.get("secret") or text.keys() - {"secret", "prefix"}:
        raise errors.InvalidInput('expected text, or {secret: "file:PATH", prefix: TEXT}')
    return text.get("prefix", "") + read(text["secret"])


def headers(given: Mapping[str, Text], read: ReadSecret) -> dict[str, str]:
    """The headers of a request; `errors.InvalidInput` for those that would break it or reveal a secret."""
    made = {"Content-Type": "application/json"}
    for name, text in given.items():
        if not _HEADER.match(name) or name.lower() in _RESERVED:
            raise errors.InvalidInput(f"{name[:100]!r} is not a header that can be set")
        if name.lower() in ("authorization", "cookie", "x-api-key") and isinstance(text, str):
            raise errors.InvalidInput(
                f"the header {name} contains a secret",
                hint='refer to it: {secret: "file:PATH", prefix: "Bearer "}',
            )
        value = text_of(text, read)
        if not value.isascii() or not value.isprintable():
            raise errors.InvalidInput(f"the header {name} contains characters that are not printable ASCII")
        made[name] = value
    return made


def body(
    format_: Format, template: Any, contact: str, sent: tracker.AlertNotification, read: ReadSecret
) -> bytes:
    """The body of the request; ``template`` replaces the format."""
    if template is not None:
        return msgspec.json.encode(_filled(template, _values(sent), read))
    if format_ == "muster":
        return msgspec.json.encode({"id": sent.id, "alert": sent.alert})
    alert = _alertmanager_alert(sent.alert)
    if format_ == "alertmanager-api":
        return msgspec.json.encode([{key: alert[key] for key in _API_FIELDS}])
    return msgspec.json.encode(
        {
            "version": "4",
            "groupKey": f"{{}}:{{alertname={msgspec.json.encode(sent.alert.rule).decode()}}}",
            "truncatedAlerts": 0,
            "status": alert["status"],
            "receiver": contact,
            "groupLabels": {"alertname": sent.alert.rule},
            "commonLabels": alert["labels"],
            "commonAnnotations": alert["annotations"],
            "externalURL": "",
            "alerts": [{**alert, "endsAt": alert["endsAt"] if alert["status"] == "resolved" else _NEVER}],
        }
    )


def check(template: Any, read: ReadSecret) -> None:
    """`errors.InvalidInput` names an unknown placeholder of a template."""
    sample = messages.Alert(
        rule="r",
        about="node:n",
        severity=messages.Severity.INFO,
        state=messages.AlertState.FIRING,
        since_ms=0,
        at_ms=0,
    )
    _filled(template, _values(tracker.AlertNotification(sample, ())), read)


_LABEL_OTHER = re.compile(r"[^a-zA-Z0-9_]|^(?=[0-9])")  # Alertmanager refuses an alert with other labels
_API_FIELDS = ("labels", "annotations", "startsAt", "endsAt", "generatorURL")


def _alertmanager_alert(alert: messages.Alert) -> dict[str, Any]:
    kind, name = _subject(alert.about)
    labels = {
        **{_LABEL_OTHER.sub("_", label): value for label, value in alert.labels.items() if value},
        "alertname": alert.rule,
        "severity": alert.severity.value,
        "about": alert.about,
        "scope": kind,
        "instance": name,
    }
    annotations = {"summary": alert.reason}
    if alert.value is not None:
        annotations["value"] = f"{alert.value:g}"
    if alert.acknowledged_by:  # not a label: Alertmanager takes an alert with another label for another alert
        annotations["acknowledged_by"] = alert.acknowledged_by
    resolved = alert.state is messages.AlertState.RESOLVED
    text = "\0".join(f"{key}\0{labels[key]}" for key in sorted(labels))
    return {
        "status": "resolved" if resolved else "firing",
        "labels": labels,
        "annotations": annotations,
        "startsAt": _time(alert.since_ms),
        "endsAt": _time(alert.at_ms if resolved else alert.at_ms + FIRING_S * 1000),
        "generatorURL": "",
        "fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def _values(sent: tracker.AlertNotification) -> dict[str, Any]:
    alert = sent.alert
    kind, name = _subject(alert.about)
    actions = {messages.AlertState.RESOLVED: "resolve", messages.AlertState.ACKNOWLEDGED: "acknowledge"}
    return {
        "id": sent.id,
        "rule": alert.rule,
        "about": alert.about,
        "kind": kind,
        "name": name,
        "severity": alert.severity.value,
        "state": alert.state.value,
        "summary": alert.reason,
        "value": alert.value,
        "since": _time(alert.since_ms),
        "at": _time(alert.at_ms),
        "action": actions.get(alert.state, "trigger"),
        **{f"labels.{key}": value for key, value in alert.labels.items()},
    }


def _filled(template: Any, values: Mapping[str, Any], read: ReadSecret) -> Any:
    if isinstance(template, dict):
        if isinstance(template.get("secret"), str) and not template.keys() - {"secret", "prefix"}:
            return text_of(template, read)
        return {key: _filled(value, values, read) for key, value in template.items()}
    if isinstance(template, list):
        return [_filled(value, values, read) for value in template]
    if not isinstance(template, str):
        return template
    whole = _PLACEHOLDER.fullmatch(template)
    if whole and whole[1] == "value":
        return values["value"]  # a number stays one

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values and not name.startswith("labels."):
            raise errors.InvalidInput(
                f"the template has no placeholder {{{name}}}",
                hint=f"there are {', '.join(PLACEHOLDERS)} and labels.NAME",
            )
        value = values.get(name)
        return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    return _PLACEHOLDER.sub(replaced, template)


def _subject(about: str) -> tuple[str, str]:
    """Kind and name: ``node:web-7`` is the node web-7, ``system`` the system."""
    kind, colon, name = about.partition(":")
    return kind, name if colon else about


def _time(at_ms: int) -> str:
    moment = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
