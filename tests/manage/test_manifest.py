from __future__ import annotations

import base64
import json
import zlib

import pytest

from muster.core import errors
from muster.manage import manifest
from muster.manage.adapters import plugins

GOOD = """
resources:
  - name: db
    type: process
    agent: host-a
    config:
      command: [sleep, "1"]
  - name: web
    type: process
    where: zone = 'east'
    depends_on: [db]
    config:
      command: [sleep, "1"]
"""


def read(text: str) -> list[manifest.ManifestEntry]:
    return manifest.read(text, plugins.config_validators())


def test_a_good_one():
    assert [entry.name for entry in read(GOOD)] == ["db", "web"]


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "says"),
    [
        ("type: process", "type: proces", 4, "resources[0].type", "no type"),
        ("name: db", 'name: "db\\n"', 3, "resources[0].name", "matching regex"),
        ("agent: host-a", 'agent: "host-a\\n"', 5, "resources[0].agent", "matching regex"),
        ("agent: host-a", 'restart: {policy: "never\\n"}', 5, "resources[0].restart.policy", "Invalid enum"),
        ("agent: host-a", "agnet: host-a", 5, "resources[0].agnet", "unknown field"),
        ('command: [sleep, "1"]', "comand: [x]", 7, "resources[0].config.comand", "unknown field"),
        ('command: [sleep, "1"]', "command: 7", 7, "resources[0].config.command", "Expected `array`"),
        ("where: zone = 'east'", "where: zone = ", 10, "resources[1].where", ""),
        ("depends_on: [db]", "depends_on: [web]", 11, "resources[1].depends_on", "cycle"),
        ("name: web", "name: db", 8, "resources[1].name", "duplicate name"),
        ("name: web", "name: a b", 8, "resources[1].name", "Expected"),
        (
            "depends_on: [db]",
            "restart: {attempts: many}",
            11,
            "resources[1].restart.attempts",
            "Expected `int`",
        ),
        ("agent: host-a", "agent: host-a\n    agent: host-b", 6, "resources[0]", "duplicate field"),
        ("agent: host-a", "group: g", 3, "resources[0].agent", "exactly one of"),
    ],
)
def test_a_fault_is_named_by_line_and_field(old, new, line, field, says):
    with pytest.raises(manifest.ManifestError) as caught:
        read(GOOD.replace(old, new, 1))
    assert (caught.value.line, caught.value.field) == (line, field), str(caught.value)
    assert says in str(caught.value)
    assert f"line {line}" in str(caught.value)


def test_a_circle_over_several_is_named():
    text = "resources:\n" + "".join(
        f"  - {{name: {name}, type: memory, agent: a, depends_on: [{other}]}}\n"
        for name, other in (("a", "b"), ("b", "c"), ("c", "a"))
    )
    with pytest.raises(manifest.ManifestError, match=r"cycle: . -> . -> . -> ."):
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "a: &a [*a]",
        "- 1",
        "resources: 7",
        "\x00",
        "resources: [{name: !!python/object:x.y {}}]",
        "a: 2020-01-01",
        r'resources: [{name: a, type: memory, agent: b, labels: {c: "\ud800"}}]',
    ],
)
def test_nonsense_is_refused(text):
    with pytest.raises(errors.InvalidInput):
        read(text)


def test_a_character_beyond_the_first_plane_is_written_as_two_escapes_in_json():
    labels = {"smile": "\U0001f600"}
    entry = {"name": "a", "type": "memory", "agent": "b", "labels": labels}
    (made,) = read(json.dumps({"resources": [entry]}))
    assert made.labels == labels


def test_aliases_cannot_multiply_without_end():
    text = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for last, name in zip("abcdefgh", "bcdefghi", strict=True):
        text += f"{name}: &{name} [{', '.join([f'*{last}'] * 10)}]\n"
    with pytest.raises(manifest.ManifestError, match="too large"):
        read(text)


def test_a_secret_is_a_reference_and_never_a_value():
    command = 'command: [sleep, "1"]'
    with pytest.raises(manifest.ManifestError, match="secret") as caught:
        read(GOOD.replace(command, "command: [x]\n      environment: {DB_PASSWORD: x}", 1))
    assert caught.value.line == 8
    reference = 'command: [x]\n      environment: {DB_PASSWORD: {secret: "env:P"}}'
    read(GOOD.replace(command, reference, 1))


def test_many_entries_are_packed_and_read_again():
    entries = [{"name": f"web-{number}", "config": {"value": "x" * 1000}} for number in range(1000)]
    packed = manifest.pack_entries(entries)
    assert isinstance(packed, str)
    assert len(packed) < 100_000
    assert manifest.unpack_entries(packed) == entries
    assert manifest.pack_entries(entries[:1]) == entries[:1]


@pytest.mark.parametrize(
    "packed", ["", "%", "aGVsbG8=", base64.b64encode(zlib.compress(b'{"a": 1}')).decode()]
)
def test_packed_entries_that_cannot_be_read_are_refused(packed):
    with pytest.raises(errors.InvalidInput, match="packed entries"):
        manifest.unpack_entries(packed)


def test_packed_entries_cannot_become_too_large():
    packed = base64.b64encode(zlib.compress(b"[" + b" " * manifest.ENTRIES_BYTES_MAX + b"]")).decode()
    with pytest.raises(errors.LimitExceeded, match="split the manifest"):
        manifest.unpack_entries(packed)


@pytest.mark.parametrize(
    ("added", "line", "field", "says"),
    [
        ("reschedule: {}", 11, "reschedule", "bound to the agent"),
        ("reschedule: {after_s: 1}", 11, "reschedule.after_s", ">= 5"),
        ("job: {}\n    restart: {policy: always}", 12, "restart.policy", "a job ends"),
        ("schedule: {cron: '61 * * * *'}", 11, "schedule.cron", "is not a minute"),
        ("schedule: {time_zone: UTC}", 11, "schedule", "missing required field `cron`"),
        ("schedule: {cron: '@daily', time_zone: Mars}", 11, "schedule.time_zone", "no time zone"),
        ("schedule: {cron: '@daily', concurrency: no}", 11, "schedule.concurrency", "Expected `str`"),
        ("schedule: {cron: '@daily'}\n    update: {}", 12, "update", "periodic job"),
        ("job: {keep: 0}", 11, "job.keep", ">= 1"),
        ("update: {healthy_deadline_s: 5}", 11, "update.healthy_deadline_s", "no update can succeed"),
        ("hooks: {post_strat: {command: [x]}}", 11, "hooks.post_strat", "unknown field"),
        ("hooks: {pre_stop: {command: []}}", 11, "hooks.pre_stop.command", "length >= 1"),
        ("hooks: {pre_stop: {command: [x], timeout_s: 0}}", 11, "hooks.pre_stop.timeout_s", "> 0"),
    ],
)
def test_a_fault_in_what_moves_runs_or_is_hooked_is_named(added, line, field, says):
    entry = f"  - name: more\n    type: process\n    config: {{command: [x]}}\n    agent: a\n    {added}\n"
    with pytest.raises(manifest.ManifestError) as caught:
        read(f"resources:\n  - name: first\n    type: memory\n    agent: a\n    group: g\n{entry}")
    assert (caught.value.line, caught.value.field) == (line - 1, f"resources[1].{field}"), str(caught.value)
    assert says in str(caught.value)


def test_only_some_types_can_move():
    text = (
        "resources: [{name: a, type: http, placement: {}, reschedule: {}, config: {health_url: 'http://x'}}]"
    )
    read(text)
    with pytest.raises(manifest.ManifestError, match="may outlive an agent that is frozen"):
        manifest.read(text, plugins.config_validators(), plugins.can_move)


def test_nothing_depends_on_a_periodic_job():
    text = GOOD.replace("agent: host-a", "agent: host-a\n    schedule: {cron: '@daily'}", 1)
    with pytest.raises(manifest.ManifestError, match="periodic job, which nothing can depend on") as caught:
        read(text)
    assert (caught.value.line, caught.value.field) == (12, "resources[1].depends_on")


@pytest.mark.parametrize(
    ("restart", "policy"),
    [("{}", "never"), ("{attempts: 3}", "on-failure"), ("{policy: on-failure}", "on-failure")],
)
def test_a_job_is_restarted_only_on_demand(restart, policy):
    (entry,) = read(f"resources: [{{name: a, type: memory, agent: b, job: {{}}, restart: {restart}}}]")
    assert manifest.specification(entry, "b", lambda name: [name]).restart.policy == policy


NUMBER = "a number without quotes and without a unit: the name of the field has the unit"


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("updat", "{}", "did you mean 'update'?"),
        ("update", "{max_paralel: 1}", "did you mean 'max_parallel'?"),
        ("desired", "upp", "did you mean 'up'?"),
        ("desired", "running", "there are up, down, drained"),
        ("restart", "{policy: allways}", "did you mean 'always'?"),
        ("config", "{command: [x], stop_signal: TREM}", "did you mean 'TERM'?"),
        ("config", "{comand: [x]}", "did you mean 'command'?"),
        ("config", "{command: [x], health: {knd: port}}", "did you mean 'kind'?"),
        ("hooks", "{prestop: {command: [x]}}", "did you mean 'pre_stop'?"),
        ("schedule", "{cron: '* * * * *', missed: lst}", "did you mean 'last'?"),
        ("schedule", "{cron: '* * * * *', time_zone: Europe/Berln}", "did you mean 'Europe/Berlin'?"),
        ("schedule", "{cron: '99 * * * *'}", "it is 0 to 59"),
        ("config", "{command: [x], stop_s: 5s}", NUMBER),
        ("config", "{command: [x], cgroup: {memory_bytes: 10MB}}", NUMBER),
        ("config", "{command: [x, 80]}", 'a text: write it in quotes, such as "8080"'),
        ("config", "{command: [x], umask: 9}", 'a text: write it in quotes, such as "8080"'),
        ("config", "{command: [x], umask: '9'}", 'Mode bits that are removed from new files, such as "027".'),
    ],
)
def test_an_error_says_what_would_be_right(field, value, hint):
    text = f"resources:\n  - name: a\n    type: process\n    agent: b\n    {field}: {value}\n"
    text += "" if field == "config" else "    config: {command: [x]}\n"
    with pytest.raises(manifest.ManifestError) as refused:
        manifest.read(text, plugins.config_validators())
    assert (refused.value.line, refused.value.hint) == (5, hint)
    assert refused.value.field.startswith(f"resources[0].{field}")
