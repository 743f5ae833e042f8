"""Requests to webhooks: built-in formats, templates, headers and secrets; the examples of the guide."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from muster.bus.http import server
from muster.core import errors, messages
from muster.pipeline import settings
from muster.pipeline.alerts import notifications, rules, tracker, webhooks
from muster.testing.eventually import eventually
from tests.pipeline import test_notices

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "alerts.md"
ALERT = messages.Alert(
    rule="hot",
    about="node:web-7",
    severity=messages.Severity.CRITICAL,
    state=messages.AlertState.FIRING,
    since_ms=1_700_000_000_000,
    at_ms=1_700_000_060_000,
    value=97.5,
    reason='node:web-7 is "hot" {rule}',
    labels={"team": "web"},
)
SENT = tracker.AlertNotification(ALERT, ("team",))
RESOLVED = tracker.AlertNotification(
    msgspec.structs.replace(ALERT, state=messages.AlertState.RESOLVED), ("team",)
)


def secret(reference: str) -> str:
    return f"<{reference}>"


def made(
    format_: webhooks.Format = "muster", template: Any = None, sent: tracker.AlertNotification = SENT
) -> Any:
    return json.loads(webhooks.body(format_, template, "team", sent, secret))


def test_a_template_is_filled_in_every_text_and_keeps_its_structure():
    template = {
        "text": "{severity}: {summary}",
        "nested": [{"value": "{value}", "plain": 3, "none": None}, "{labels.team}{labels.other}"],
        "key": {"secret": "env:KEY"},
        "action": "{action}",
        "times": "{since} {at}",
        "code": "{not a placeholder} {}",
    }
    assert made(template=template) == {
        "text": 'critical: node:web-7 is "hot" {rule}',
        "nested": [{"value": 97.5, "plain": 3, "none": None}, "web"],
        "key": "<env:KEY>",
        "action": "trigger",
        "times": "2023-11-14T22:13:20.000Z 2023-11-14T22:14:20.000Z",
        "code": "{not a placeholder} {}",
    }
    assert made(template={"action": "{action}"}, sent=RESOLVED) == {"action": "resolve"}
    with pytest.raises(errors.InvalidInput, match=r"no placeholder .rules"):
        webhooks.check({"a": ["{rules}"]}, secret)


def test_the_formats_of_alertmanager():
    """Names and forms as in Alertmanager's documentation of webhooks, and in its API v2."""
    sent = made("alertmanager")
    assert {"version", "groupKey", "status", "receiver", "groupLabels", "commonLabels"} <= sent.keys()
    assert (sent["version"], sent["status"], sent["receiver"]) == ("4", "firing", "team")
    (alert,) = sent["alerts"]
    assert alert["labels"]["alertname"] == "hot"
    assert alert["labels"]["team"] == "web"
    assert alert["startsAt"] == "2023-11-14T22:13:20.000Z"
    assert alert["endsAt"] == "0001-01-01T00:00:00Z"
    assert re.fullmatch("[0-9a-f]{16}", alert["fingerprint"])
    (ended,) = made("alertmanager", sent=RESOLVED)["alerts"]
    assert (ended["status"], ended["fingerprint"]) == ("resolved", alert["fingerprint"])
    assert ended["endsAt"] == "2023-11-14T22:14:20.000Z"
    (posted,) = made("alertmanager-api")
    assert posted.keys() == {"labels", "annotations", "startsAt", "endsAt", "generatorURL"}
    assert posted["endsAt"] > "2023-12"  # firing until it is resolved, not for Alertmanager's five minutes
    assert all(isinstance(value, str) for value in posted["labels"].values())


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({"Host": "evil.example"}, "not a header that can be set"),
        ({"Content-Length": "1"}, "not a header that can be set"),
        ({"X Y": "1"}, "not a header that can be set"),
        ({"X-Y": "a\r\nX-Z: b"}, "printable"),
        ({"Authorization": "Bearer abc"}, "contains a secret"),
        ({"X-Y": {"secrets": "env:X"}}, "expected text"),
    ],
)
def test_headers_that_would_break_a_request_or_show_a_secret_are_refused(headers: Any, problem: str):
    with pytest.raises(errors.InvalidInput, match=problem):
        webhooks.headers(headers, secret)


async def test_a_request_has_the_headers_and_the_body_of_its_receiver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    requests: list[server.HttpRequest] = []

    def received(request: server.HttpRequest) -> server.HttpResponse:
        requests.append(request)
        return server.json_response({})

    monkeypatch.setenv("TOKEN", "abc")
    listener = await server.serve({}, "127.0.0.1", 0, post_routes={"/hook": received})
    url = f"http://127.0.0.1:{listener.port}"
    try:
        (tmp_path / "url").write_text(f"{url}/hook\n")
        receiver = notifications.AlertContact(
            webhook={"secret": f"file:{tmp_path / 'url'}"},
            headers={"Authorization": {"secret": "env:TOKEN", "prefix": "Bearer "}, "X-Team": "web"},
            body={"text": "{rule} of {name}"},
        )
        pipeline_settings = settings.PipelineSettings(webhooks_allowed=(url,))
        notifications.refuse_forbidden("team", receiver, pipeline_settings)
        async with test_notices.sending(receiver, pipeline_settings) as sender:
            sender.add(SENT)
            await eventually(lambda: sender.sent)
    finally:
        await listener.close()
    (request,) = requests
    assert request.headers["authorization"] == "Bearer abc"
    assert request.headers["x-team"] == "web"
    assert json.loads(request.body) == {"text": "hot of web-7"}
    with pytest.raises(errors.InvalidInput, match="the address in its secret is not allowed"):
        notifications.refuse_forbidden("team", receiver, settings.PipelineSettings())
    monkeypatch.delenv("TOKEN")
    with pytest.raises(errors.InvalidInput, match="TOKEN"):
        notifications.refuse_forbidden("team", receiver, pipeline_settings)


def test_the_examples_of_the_guide_are_accepted_and_have_the_forms_of_their_services():
    (text,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (rule,) = rules.parse(text)
    contacts = notifications.parse_contacts(text, "guide")
    assert set(rule.notify) == contacts.keys() == yaml.safe_load(text)["contacts"].keys()
    bodies = {
        name: made(contact.format, contact.body) for name, contact in contacts.items() if contact.webhook
    }
    for contact in contacts.values():
        webhooks.headers(contact.headers, secret)
        webhooks.check(contact.body, secret)
    assert bodies["slack"].keys() == {"text"}
    (attachment,) = bodies["teams"]["attachments"]
    assert attachment["content"]["type"] == "AdaptiveCard"
    event = bodies["pagerduty"]
    assert event["event_action"] in ("trigger", "acknowledge", "resolve")
    assert event["payload"]["severity"] in ("critical", "error", "warning", "info")
    assert {"routing_key", "dedup_key", "payload"} <= event.keys()
    assert {"summary", "source", "severity"} <= event["payload"].keys()
    assert bodies["alertmanager"][0]["labels"]["alertname"] == "hot"
