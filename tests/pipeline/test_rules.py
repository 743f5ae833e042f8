"""Rules in YAML, and the contacts they name."""

import pytest

from muster.core import errors, messages
from muster.pipeline import settings
from muster.pipeline.alerts import notifications, rules

GOOD = """
rules:
  - name: hot
    scope: node
    when: cpu_percent > 95
    until: cpu_percent < 80
    for: 1m30s
    severity: critical
    summary: "{about} is at {value:.0f} %"
    labels: {team: web}
    notify: [web]
  - {name: odd, scope: group, when: cpu_percent_z > 4 OR cpu_percent_z < -4}
  - {name: no-data, scope: group, only: [web], when: reports = 0}
"""


def test_a_rule_is_read_as_it_is_written():
    hot, odd, absent = rules.parse(GOOD)
    assert (hot.for_s, hot.severity, hot.notify) == (90.0, messages.Severity.CRITICAL, ("web",))
    assert hot.format_summary("node:a", 97.4) == "node:a is at 97 %"
    assert hot.measured == "cpu_percent"
    assert odd.names == {"cpu_percent_z"}
    assert absent.only == ("web",)


def test_a_rule_may_ask_about_metrics_that_no_list_holds():
    node, group = rules.parse(
        "- {name: a, scope: node, when: own.queue > 100}\n- {name: b, scope: group, when: own.queue_mean > 9}"
    )
    assert node.names == {"own.queue"}
    assert node.measured == "own.queue"
    assert group.measured == "own.queue_mean"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("- {name: a, scope: group, when: own.queue > 1}", "own.queue"),
        ("- {name: a, scope: node, when: queue > 1}", "queue"),
        ("- {name: a, scope: node, when: sender.queue > 1}", "scope"),
        ("- {name: a, scope: node, when: 'cpu_prcent > 1'}", "cpu_prcent"),
        ("- {name: a, scope: node, when: 'cpu_percent >'}", r"(?s)\(a\).*\^"),
        ('- {name: a, scope: node, when: "machine > 4"}', "machine"),
        ("- {name: a, scope: planet, when: 'TRUE'}", "planet"),
        ("- {name: 'a b', scope: node, when: 'TRUE'}", "cannot be a name"),
        ("- {name: a, scope: node, when: 'TRUE', colour: red}", "colour"),
        ("- {name: a, scope: node, when: 'TRUE', for: soon}", "not a duration"),
        ("- {name: a, scope: node, when: 'TRUE', summary: '{who}'}", "summary"),
        ("- {name: a, scope: node, when: 'TRUE'}\n- {name: a, scope: node, when: 'TRUE'}", "two rules"),
        ("rules: 7", "list"),
        ("- 7", "mapping"),
        ("{", "YAML"),
    ],
)
def test_a_wrong_rule_is_refused_with_what_is_wrong(text, fault):
    with pytest.raises(errors.InvalidInput, match=fault):
        rules.parse(text)


@pytest.mark.parametrize(
    "contact",
    [
        notifications.AlertContact(webhook="https://evil.example/x"),
        notifications.AlertContact(webhook="https://hooks.example.evil.example/web"),
        notifications.AlertContact(webhook="https://hooks.example/web/../admin"),
        notifications.AlertContact(webhook="https://user@hooks.example/web"),
        notifications.AlertContact(webhook="http://hooks.example/web"),
        notifications.AlertContact(webhook="file:///etc/passwd"),
        notifications.AlertContact(mail=("eve@evil.example",)),
        notifications.AlertContact(mail=("ann@example.org, eve@evil.example",)),
        notifications.AlertContact(mail=("ann@example.org\nBcc: eve@evil.example",)),
    ],
)
def test_notices_go_to_allowed_addresses_only(contact):
    pipeline_settings = settings.PipelineSettings(
        webhooks_allowed=("https://hooks.example/web",),
        mail_allowed=("@example.org",),
        mail_server="127.0.0.1:25",
    )
    with pytest.raises(errors.InvalidInput, match="not allowed"):
        notifications.refuse_forbidden("x", contact, pipeline_settings)


def test_allowed_addresses_pass():
    pipeline_settings = settings.PipelineSettings(
        webhooks_allowed=("https://hooks.example/web",),
        mail_allowed=("@example.org",),
        mail_server="127.0.0.1:25",
    )
    good = notifications.AlertContact(webhook="https://hooks.example/web/7", mail=("ann@example.org",))
    notifications.refuse_forbidden("x", good, pipeline_settings)


@pytest.mark.parametrize("key", ["contacts", "receivers"])
def test_contacts_are_read_from_files_of_the_previous_version_too(key):
    contacts = notifications.parse_contacts(f"{key}: {{team: {{mail: [ann@example.org]}}}}", "rules.yaml")
    assert contacts["team"].mail == ("ann@example.org",)
    with pytest.raises(errors.InvalidInput, match="contacts"):
        notifications.parse_contacts(f"{key}: {{team: {{fax: 1}}}}", "rules.yaml")
