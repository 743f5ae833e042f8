"""REST on a real domain: what can be read and done, by whom, and what leaves a trace."""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import lxml.html
import msgspec
import pytest

from muster.manage import manifest
from muster.web.auth import sessions
from muster.web.pages import forms
from muster.web.rest import resources as resources_rest
from tests.cli import driver
from tests.web.conftest import PASSWORDS, Api, Running, wait_until

NASTY = "<script>alert('x')</script>"

READS = [
    "/overview",
    "/reports/system",
    "/reports/groups",
    "/reports/groups/default",
    "/reports/nodes",
    "/reports/nodes/sensor",
    "/resources",
    "/summary",
    "/managers",
    "/agents",
    "/rollouts",
    "/brokers",
    "/links",
    "/alerts",
    "/pipeline/batches",
    "/contexts",
    "/information-nodes",
    "/services",
    "/receivers",
    "/models",
    "/queues",
    "/subscriptions",
    "/dead-letters",
    "/scheduled-messages",
    "/capacity",
    "/activity",
    "/me",
]


def test_a_viewer_reads_everything_the_dashboard_shows(vera):
    wait_until(lambda: vera.get("/reports/nodes").json()["items"])
    for path in READS:
        answer = vera.get(path)
        assert answer.status_code == 200, (path, answer.text)


def test_a_disabled_service_is_reported_with_a_hint(vera):
    answer = vera.get("/pipeline/progress")
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "unavailable"
    assert "muster run pipeline" in answer.json()["hint"]
    assert vera.get("/history/nodes").status_code == 404


def test_a_node_s_report_is_the_sensor_s_own_and_descends_from_the_system(vera):
    wait_until(lambda: vera.get("/reports/nodes").json()["total"] == 1)
    system = vera.get("/reports/system").json()
    group = vera.get("/reports/groups/default").json()
    node = vera.get("/reports/nodes/sensor").json()
    assert system["machines"] == group["machines"] == 1
    assert node["machine"] == "sensor"
    assert "cpu_percent" in node["metrics"]
    assert vera.get("/reports/nodes/nobody").status_code == 404
    at = node["at_ms"] + 5000
    wait_until(lambda: time.time() * 1000 > at)
    then = vera.get("/reports/nodes/sensor", params={"at": at}).json()
    assert then["sequence"] >= node["sequence"]
    early = vera.get("/reports/nodes/sensor", params={"at": 1000})
    assert early.status_code == 404


# Contexts


def test_a_context_is_written_read_found_and_deleted_under_its_version(olga):
    path = "/contexts/printers/3"
    made = olga.put(path, json={"value": "<printer/>", "attributes": {"floor": 2}})
    assert made.status_code == 200, made.text
    first = made.headers["etag"]
    got = olga.get(path)
    assert got.headers["etag"] == first
    assert got.json()["value"] == "<printer/>"
    actual = olga.get("/contexts", params={"where": "floor = 2"}).json()["items"]
    assert [row["key"] for row in actual] == ["printers/3"]

    changed = olga.put(path, json={"value": "new"}, headers={"If-Match": first})
    assert changed.status_code == 200
    lost = olga.put(path, json={"value": "late"}, headers={"If-Match": first})
    assert lost.status_code == 412
    assert lost.json()["code"] == "precondition-failed"
    assert olga.get(path).json()["value"] == "new"

    history = olga.get("/context-history/printers/3").json()["items"]
    assert [item.get("value") for item in history] == ["<printer/>", "new"]
    replicas = olga.get("/context-replicas/printers/3").json()["items"]
    assert replicas[0]["replica_kind"] == "primary"
    assert olga.delete(path, headers={"If-Match": first}).status_code == 412
    assert olga.delete(path, headers={"If-Match": changed.headers["etag"]}).status_code == 204
    assert olga.get(path).status_code == 404


def test_searches_come_in_pages_and_reads_may_ask_for_the_newest(olga):
    keys = [f"paged/{number}" for number in range(5)]
    for key in keys:
        assert (
            olga.put(f"/contexts/{key}", json={"value": "v", "attributes": {"paged": True}}).status_code
            == 200
        )
    actual = []
    query = {"where": "paged", "limit": "2"}
    while True:
        page = olga.get("/contexts", params=query).json()
        assert (page["silent"], page["failed"], page["cut"]) == ([], {}, [])
        actual.append([row["key"] for row in page["items"]])
        if page["next"] is None:
            break
        query["cursor"] = page["next"]
    assert actual == [keys[:2], keys[2:4], keys[4:]]
    assigned = olga.post("/contexts", json={"value": "whose key?"})
    assert assigned.status_code == 201, assigned.text
    path = f"/contexts/{assigned.json()['key']}"
    assert olga.get(path, params={"max_staleness_s": 0}).json()["value"] == "whose key?"
    assert olga.get(path, params={"max_staleness_s": -1}).status_code == 400


def test_contexts_are_read_with_the_rights_of_the_user(olga, vera):
    made = {"value": "v", "attributes": {"hidden": True}}
    assert olga.put("/contexts/secret/1", json=made).status_code == 200
    assert olga.get("/contexts/secret/1").json()["value"] == "v"
    assert len(olga.get("/contexts", params={"where": "hidden"}).json()["items"]) == 1
    refused = vera.get("/contexts/secret/1")
    assert (refused.status_code, "vera may not read" in refused.json()["detail"]) == (403, True)
    assert vera.get("/context-history/secret/1").status_code == 403
    assert vera.get("/contexts", params={"where": "hidden"}).json()["items"] == []


def test_bytes_that_are_no_text_travel_in_base_64(olga):
    assert olga.put("/contexts/bytes", json={"value_base64": "/wA="}).status_code == 200
    assert olga.get("/contexts/bytes").json()["value_base64"] == "/wA="
    assert olga.put("/contexts/bytes", json={"value_base64": "!"}).status_code == 400
    assert olga.put("/contexts/bytes", json={"value": "a", "value_base64": "YQ=="}).status_code == 400


@pytest.mark.parametrize("key", ["a\nb/\x1b[31m\n", "//", "a?b#c", "%2F"])
def test_every_key_can_be_addressed(olga, key):
    place = quote(key, safe="")
    assert olga.put(f"/contexts/{place}", json={"value": "v"}).json()["key"] == key
    assert olga.get(f"/contexts/{place}").json()["key"] == key
    for of in ("context-history", "context-replicas"):
        assert len(olga.get(f"/{of}/{place}").json()["items"]) == 1
    assert olga.delete(f"/contexts/{place}").status_code == 204


def test_a_watch_of_a_context_resumes_at_its_position(olga):
    versions = [
        olga.put("/contexts/watched/1", json={"value": text}).json()["version"] for text in ("a", "b", "c")
    ]

    def watch_events(headers: dict[str, str], count: int, **params: int) -> list[tuple[str, str]]:
        events: list[tuple[str, str]] = []
        id = ""
        with olga.stream("GET", "/watch-context/watched/1", headers=headers, params=params) as answer:
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    id = line[4:]
                elif line.startswith("data: "):
                    events.append((id, json.loads(line[6:])["value"]))
                    if len(events) == count:
                        return events
        raise AssertionError(events)

    a, b, c = map(str, versions)
    assert watch_events({}, 3) == [(a, "a"), (b, "b"), (c, "c")]
    assert watch_events({"Last-Event-ID": a}, 2) == [(b, "b"), (c, "c")]
    assert watch_events({"Last-Event-ID": b}, 1, after_version=versions[0]) == [(c, "c")]
    assert olga.get("/watch-context/watched/1", headers={"Last-Event-ID": "x"}).status_code == 400


def test_a_service_entry_is_saved_and_found(olga):
    entry = {"name": "maps", "access": ["http://127.0.0.1:1"], "metadata": {"lang": "en"}}
    assert olga.put("/services/maps-1", json=entry).status_code == 200
    assert olga.get("/services/maps-1").json()["name"] == "maps"
    wait_until(lambda: olga.get("/services", params={"where": "lang = 'en'"}).json()["items"])
    assert olga.delete("/services/maps-1").status_code == 204
    assert olga.get("/services/maps-1").status_code == 404


# Resources


def test_a_resource_is_made_watched_changed_and_deleted(lab, olga):
    received: list[dict[str, object]] = []
    watching = threading.Thread(target=watch, args=(lab, olga, "resources", received), daemon=True)
    watching.start()
    expected = {"type": "memory", "agent": "local", "labels": {"note": NASTY}}
    made = olga.put("/resources/r-1", json=expected)
    assert made.status_code == 200, made.text
    wait_until(lambda: olga.get("/resources/r-1").json()["state"] == "up")
    wait_until(
        lambda: any(resource["resource"] == "r-1" and resource["state"] == "up" for resource in received)
    )
    watching.join(30)
    version = olga.get("/resources/r-1").headers["etag"]

    selected = olga.get("/resources", params={"where": "type = 'memory' AND state = 'up'"}).json()
    assert "r-1" in [row["name"] for row in selected["items"]]
    assert {row["type"] for row in selected["items"]} == {"memory"}
    changed = olga.put("/resources/r-1", json={**expected, "group": "g"}, headers={"If-Match": version})
    assert changed.status_code == 200, changed.text
    assert olga.put("/resources/r-1", json=expected, headers={"If-Match": version}).status_code == 412
    assert olga.put("/resources/r-9", json=expected, headers={"If-Match": "*"}).status_code == 412

    # Fields that are left out stay; fields that equal their default are changed to it.
    stays = {**expected, "desired": "down"}
    stays.pop("labels")
    kept = olga.put("/resources/r-1", json=stays).json()
    assert (kept["desired"], kept["group"], kept["spec"]["labels"]) == ("down", "g", {"note": NASTY})
    defaults: dict[str, object] = {"desired": "up", "group": "default", "labels": {}, "where": None}
    reset = olga.put("/resources/r-1", json={**expected, **defaults}).json()
    assert (reset["desired"], reset["group"], reset["spec"]["labels"]) == ("up", "default", {})

    done = olga.post("/resources/r-1/executions", json={"operation": "get"})
    assert done.status_code == 200, done.text
    log = olga.get("/resources/r-1/logs", params={"lines": 5}).json()
    assert "have no log" in log["reason"], log
    assert olga.post("/resources/r-1/drain").status_code == 200
    assert olga.post("/resources/r-1/undrain").status_code == 200
    assert olga.delete("/resources/r-1", headers={"If-Match": version}).status_code == 412
    assert olga.delete("/resources/r-1").status_code == 200
    wait_until(lambda: olga.get("/resources/r-1").status_code == 404)


def test_logs_of_several_resources_are_merged_and_followed(olga):
    script = "echo begun; while sleep 0.1; do echo more; done"
    for name in ("say-1", "say-2"):
        config = {"command": ["sh", "-c", script]}
        made = olga.put(
            f"/resources/{name}", json={"type": "process", "agent": "local", "group": "say", "config": config}
        )
        assert made.status_code == 200, made.text

    def lines(**params: object) -> set[tuple[str, str]]:
        answer = olga.get("/logs", params=params)
        assert answer.status_code == 200, answer.text
        return {(line["resource"], line["line"]) for line in answer.json()["lines"]}

    begun = {("say-1", "begun"), ("say-2", "begun")}
    wait_until(lambda: begun <= lines(where="group = 'say'", lines=1000))
    assert lines(name=["say-1", "say-2"], lines=1) <= {("say-1", "more"), ("say-2", "more"), *begun}
    assert {name for name, _ in lines(name="say-1", since_s=60)} == {"say-1"}

    def records() -> int:
        told = olga.get("/activity", params={"what": "logs", "target": "say-2", "limit": 200}).json()["items"]
        return sum(record["target"] == "say-2" for record in told)

    path = "/resources/say-2/logs"
    part = olga.get(path, params={"lines": 1}).json()
    for _ in range(3):  # an open page asks every second: that must not displace the log of activity
        part = olga.get(path, params={"cursor": part["cursor"]}).json()
    assert olga.get(path, params={"lines": 1}).status_code == 200
    wait_until(lambda: records() >= 2)
    assert records() == 2
    seen: set[str] = set()
    with olga.stream("GET", "/watch-logs", params={"where": "group = 'say'"}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                assert json.loads(line[6:])["line"] == "more"
                seen.add(json.loads(line[6:])["resource"])
            if len(seen) == 2:
                break
    for path in ("/logs", "/watch-logs"):
        assert olga.get(path).status_code == 400
        assert olga.get(path, params={"name": "nothing"}).status_code == 404
    for name in ("say-1", "say-2"):
        olga.delete(f"/resources/{name}")
    wait_until(lambda: olga.get("/resources/say-2").status_code == 404)


def test_why_a_log_has_no_lines_is_sent_while_it_is_followed(olga):
    assert olga.put("/resources/mute", json={"type": "memory", "agent": "local"}).status_code == 200
    wait_until(lambda: olga.get("/resources/mute").json()["state"] == "up")
    with olga.stream("GET", "/watch-logs", params={"name": "mute"}) as answer:
        told = next(line for line in answer.iter_lines() if line.startswith("data: "))
    assert "mute" in json.loads(told[6:])["note"]
    olga.delete("/resources/mute")
    wait_until(lambda: olga.get("/resources/mute").status_code == 404)


def test_an_operation_runs_on_many_resources_in_batches(olga, vera):
    for number in range(3):
        body = {"type": "memory", "agent": "local", "group": "many"}
        assert olga.put(f"/resources/many-{number}", json=body).status_code == 200
    wait_until(lambda: all(olga.get(f"/resources/many-{n}").json()["state"] == "up" for n in range(3)))
    body = {"where": "group = 'many'", "operation": "restart", "batch": "2"}
    assert vera.post("/rollouts", json=body).status_code == 403
    assert olga.post("/rollouts", json={**body, "names": ["many-1"]}).status_code == 400
    assert olga.post("/rollouts", json={**body, "batch": "2\n"}).status_code == 400
    made = olga.post("/rollouts", json=body)
    assert made.status_code == 201, made.text
    id = made.json()["id"]

    def ended() -> bool:
        (row,) = [row for row in olga.get("/rollouts").json()["items"] if row["id"] == id]
        return bool(row["state"] == "done")

    wait_until(ended)
    assert {step["state"] for step in olga.get(f"/rollouts/{id}/steps").json()["items"]} == {"done"}
    for number in range(3):
        olga.delete(f"/resources/many-{number}")


def test_a_machine_is_drained_and_returned_to_service(olga, vera):
    assert vera.post("/agents/local/drain").status_code == 403
    assert olga.post("/agents/nothing/drain").status_code == 404
    try:
        assert olga.post("/agents/local/drain").status_code == 200
        wait_until(lambda: olga.get("/agents").json()["items"][0]["cordoned"])
    finally:
        assert olga.post("/agents/local/undrain").status_code == 200
    wait_until(lambda: not olga.get("/agents").json()["items"][0]["cordoned"])


def watch(running: Running, client: Api, what: str, received: list[dict[str, object]]) -> None:
    """Server-sent events, until r-1 is up."""
    with client.stream("GET", f"/watch/{what}") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                received.append(json.loads(line[6:]))
                if received[-1].get("resource") == "r-1" and received[-1]["state"] == "up":
                    return


def test_a_manifest_is_planned_and_its_faults_are_named(olga):
    text = "resources:\n  - {name: p-1, type: memory, agent: local}\n"
    plan = olga.post("/plans", json={"manifest": text}).json()["items"]
    assert [row["name"] for row in plan] == ["p-1"]
    assert olga.get("/resources/p-1").status_code == 404
    bad = olga.post("/manifests", json={"manifest": "resources:\n  - {name: p-1, tipe: memory}\n"})
    assert bad.status_code == 400
    assert "line 2" in bad.json()["detail"]


def test_long_lists_come_in_pages_and_huge_ones_are_refused(olga):
    lines = "".join(f"  - {{name: page-{n:03}, type: memory, agent: local}}\n" for n in range(25))
    assert olga.post("/manifests", json={"manifest": f"resources:\n{lines}"}).status_code == 200
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        params = {"where": "name LIKE 'page-%'", "limit": 10, "cursor": cursor}
        page = olga.get("/resources", params=params).json()
        assert len(page["items"]) <= 10
        seen += [row["name"] for row in page["items"]]
        cursor = page["next"]
    assert seen == [f"page-{n:03}" for n in range(25)]
    assert olga.get("/resources", params={"limit": 100_000}).status_code == 400
    assert olga.get("/activity", params={"limit": 0}).status_code == 400
    assert olga.get("/contexts", params={"where": "x" * 5000}).status_code == 400
    names = [{"name": name} for name in seen]
    for name in names:
        olga.delete(f"/resources/{name['name']}")


# Notification and messages


def test_receivers_reasons_and_sending(lab, olga):
    model = lab.place / "models.yaml"
    model.write_text(
        "models:\n"
        "  - {name: Server, of: receiver, attributes: {load: float, kind: string}}\n"
        "  - {name: alert, of: event, attributes: {level: int}}\n"
    )
    defined = lab.muster("notify", "define", str(model))
    assert {item["name"] for item in defined} == {"Server", "alert"}
    question = {
        "address": "load > 5",
        "event": {"type": "alert", "content": {"level": 4}},
    }  # true for no receiver
    response = olga.post("/notify/who", json=question)
    assert response.status_code == 200, response.text
    assert response.json()["count"] == 0
    wrong = olga.post("/notify/who", json={"address": "load >"})
    assert wrong.status_code == 400
    assert wrong.json()["position"] == 6
    assert olga.post("/notify/check", json={"policy": "alert AND level >= 4"}).json()["clauses"] == 2
    sent = olga.post("/notify/events", json=question)
    assert sent.status_code == 202, sent.text
    assert olga.get("/models").json()["total"] == 2
    with browsing(lab, "olga") as browser:  # the playground reads a policy as notifiers do
        for policy, words in (
            ("event: (alert AND level >= 4)", "The policy accepts this event."),
            ("alert AND event.level >= 5", "The policy does not accept this event."),
            ("alert AND sender: (load > 0.5)", "The policy accepts this event from matching senders."),
        ):
            tried = {"type": "alert", "content": "level=4", "policy": policy}
            assert words in browser.get("/playground", params=tried).text


def test_a_queue_is_browsed_moved_and_emptied(lab, olga):
    for body in ("one", NASTY):
        lab.muster("message", "send", "queue:orders", body)

    def depth() -> int:
        listed = olga.get("/queues").json()["items"]  # read within the last second
        return int(next((item["depth"] for item in listed if item["queue"] == "orders"), 0))

    wait_until(lambda: depth() == 2)
    first = olga.get("/queues/orders/messages", params={"limit": 1}).json()
    assert [message["body"] for message in first["items"]] == ["one"]
    second = olga.get("/queues/orders/messages", params={"limit": 1, "cursor": first["next"]}).json()
    assert [message["body"] for message in second["items"]] == [NASTY]
    moved = olga.post("/queues/orders/moves", json={"to": "queue:later", "limit": 1})
    assert moved.json()["moved"] == 1
    assert olga.delete("/queues/orders/messages").json() == {"queue": "orders", "purged": 1}
    assert olga.delete("/queues/later/messages").json()["purged"] == 1
    for unknown in (
        olga.get("/queues/ordres/messages"),
        olga.delete("/queues/ordres/messages"),
        olga.post("/queues/ordres/moves", json={"to": "queue:later"}),
    ):
        assert (unknown.status_code, unknown.json()["hint"]) == (404, "did you mean orders?")


def test_scheduled_messages_are_listed_and_cancelled(lab, olga):
    for minutes in (2, 1):
        lab.muster("message", "send", "queue:later", f"in {minutes}", "--delay", f"{minutes}m")
    first = olga.get("/scheduled-messages", params={"destination": "queue:later", "limit": 1}).json()
    second = olga.get(
        "/scheduled-messages", params={"destination": "queue:later", "limit": 1, "cursor": first["next"]}
    ).json()
    (soon,), (late,) = first["items"], second["items"]
    assert soon["delivery_time_ms"] < late["delivery_time_ms"]
    assert second["next"] is None
    assert olga.delete(f"/scheduled-messages/{soon['number']}").json() == {"number": soon["number"]}
    assert olga.delete(f"/scheduled-messages/{soon['number']}").status_code == 404
    lab.muster("message", "cancel", late["id"])
    assert olga.get("/scheduled-messages", params={"destination": "queue:later"}).json()["items"] == []


def test_every_message_of_a_queue_is_browsed_though_an_answer_holds_few(lab, olga):
    """All of these do not fit into one answer of the dispatcher."""
    for number in range(7):
        sent = driver.quick("message", "send", "queue:large", f"{number}" * 100_000, home=lab.place)
        assert sent.code == 0, sent.err
    actual: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = olga.get("/queues/large/messages", params={"cursor": cursor}).json()
        assert page["items"]
        actual += [message["body"][0] for message in page["items"]]
        cursor = page["next"]
    assert actual == [*"0123456"]
    assert olga.delete("/queues/large/messages").json()["purged"] == 7


@contextlib.contextmanager
def browsing(lab: Running, name: str) -> Iterator[httpx.Client]:
    """A browser that is logged in."""
    origin = {"Origin": lab.url}
    with httpx.Client(base_url=lab.url, timeout=60, follow_redirects=True, headers=origin) as browser:
        arguments = {"name": name, "password": PASSWORDS[name]}
        assert browser.post("/login", data=arguments).status_code == 200
        yield browser


def form_of(browser: httpx.Client, path: str, act: str) -> dict[str, str]:
    """The fields of a page's form, as a browser would send them."""
    page: Any = lxml.html.fromstring(browser.get(path).text)
    (form,) = [item for item in page.forms if item.action == f"/do/{act}"]
    return {name: value.removeprefix("\n") for name, value in form.form_values()}


def test_writing_a_context_again_keeps_unchanged_fields(lab, olga):
    body = {
        "value": "\nfirst line",
        "attributes": {"floor": 2, "room": "2", "open": True, "share": 0.5, "tags": ["b c", "a"]},
        "lease_s": 3600,
    }
    versions = [olga.put("/contexts/kept-anew", json=body).json()["version"] for _ in range(30)]
    with browsing(lab, "olga") as browser:
        form = form_of(browser, "/contexts/details?key=kept-anew", "put-context")
        assert form["value"] == "\nfirst line"
        page = browser.get("/contexts/details?key=kept-anew").text
        newest = re.search(r'id="past".*?<tbody>.*?<td[^>]*>(\d+)<', page, re.DOTALL)
        assert newest is not None
        assert newest[1] == str(versions[-1])
        done = browser.post("/do/put-context", data={**form, "value": "corrected"})
        assert "Written: kept-anew" in done.text
        again = browser.post("/do/put-context", data={**form, "value": "of an older page"})
        assert "Written: kept-anew" not in again.text
    actual = olga.get("/contexts/kept-anew", params={"max_staleness_s": 0}).json()
    assert actual["value"] == "corrected"
    assert actual["version"] > versions[-1]
    tags = actual["attributes"].pop("tags")
    assert sorted(tags) == ["a", "b c"]
    assert actual["attributes"] == {"floor": 2, "room": "2", "open": True, "share": 0.5}
    assert 0 < actual["expires_at_ms"] / 1000 - time.time() <= 3600


# Who may


ACTS = [
    ("POST", "/contexts", {"value": "v"}),
    ("PUT", "/contexts/x", {"value": "v"}),
    ("DELETE", "/contexts/x", None),
    ("PUT", "/resources/x", {"type": "memory", "agent": "local"}),
    ("DELETE", "/resources/x", None),
    ("POST", "/resources/x/executions", {"operation": "get"}),
    ("POST", "/resources/x/drain", None),
    ("POST", "/manifests", {"manifest": "resources: []"}),
    ("POST", "/alerts/acknowledgements", {"rule": "r", "about": "a"}),
    ("POST", "/alerts/resolutions", {"rule": "r", "about": "a"}),
    ("POST", "/silences", {"covers": "TRUE", "for_s": 60}),
    ("POST", "/notify/events", {"event": {"type": "alert"}}),
    ("DELETE", "/queues/q/messages", None),
    ("POST", "/queues/q/moves", {}),
    ("DELETE", "/scheduled-messages/1", None),
    ("PUT", "/services/s", {"name": "n"}),
    ("PUT", "/logins/mallory", {"password": "long enough", "role": "admin"}),
    ("DELETE", "/logins/admin", None),
    ("POST", "/brokers", {"name": "b"}),
    ("POST", "/links", {"near": "a", "far": "b"}),
]


def test_the_page_of_a_context_shows_its_earlier_values(lab, olga):
    for value in ("the first", "the second"):
        assert olga.put("/contexts/remembered", json={"value": value}).status_code == 200
    with browsing(lab, "olga") as browser:  # the tables wait for slow sections
        page = browser.get("/contexts/details", params={"key": "remembered", "tables": "1"}).text
    assert ("the first" in page, "the second" in page) == (True, True)


def test_a_long_message_about_a_result_reaches_its_page(lab):
    with browsing(lab, "olga") as browser:
        token = browser.get("/contexts").text.split('name="form" value="', 1)[1].split('"', 1)[0]
        fields = {"form": token, "back": "/contexts", "covers": "名" * 3000, "for_s": "1h"}
        answer = browser.post("/do/silence", data=fields)
        page: Any = lxml.html.fromstring(answer.text)
        (notice,) = page.find_class("notice")
        assert notice.text_content().startswith("Failed: ")
        assert len(answer.history[0].headers["set-cookie"]) < 4096


def test_a_viewer_cannot_act_and_each_attempt_is_written_down(vera, admin):
    begin_ms = int(time.time() * 1000)  # other tests are refused too
    for method, path, body in ACTS:
        answer = vera.request(method, path, json=body)
        assert answer.status_code == 403, (path, answer.text)

    def written() -> bool:
        lines = admin.get("/activity", params={"who": "vera", "limit": 200}).json()["items"]
        refused = [
            line
            for line in lines
            if line["outcome"] == "refused" and "viewer" in line["why"] and line["at_ms"] >= begin_ms
        ]
        return len(refused) == len(ACTS)

    wait_until(written)


def test_an_operator_changes_neither_logins_nor_brokers(olga):
    assert olga.put("/logins/eve", json={"password": "long enough"}).status_code == 403
    assert olga.get("/logins").status_code == 403
    assert olga.post("/brokers", json={"name": "b-9"}).status_code == 403


def test_every_action_is_in_the_activity_log_with_its_outcome(lab, olga, admin):
    olga.put("/contexts/audited", json={"value": "v"})
    olga.delete("/resources/not-there")

    def written() -> bool:
        lines = admin.get("/activity", params={"who": "olga", "limit": 200}).json()["items"]
        actual = {(line["what"], line["target"], line["outcome"]) for line in lines}
        return {("put-context", "audited", "done"), ("delete", "not-there", "refused")} <= actual

    wait_until(written)
    by_command_line = lab.muster("activity")
    assert any(record["what"] == "put-context" and record["who"] == "olga" for record in by_command_line)


def test_one_action_leaves_one_record_with_user_and_address(lab, olga, admin):
    for queue in ("once", "after"):
        lab.muster("message", "send", f"queue:{queue}", "purged")
        assert olga.delete(f"/queues/{queue}/messages").status_code == 200
        olga.delete(f"/resources/{queue}")

    def records() -> dict[tuple[str, str], list[Any]]:
        collected: dict[tuple[str, str], list[Any]] = {}
        for item in admin.get("/activity", params={"who": "olga", "limit": 200}).json()["items"]:
            collected.setdefault((item["what"], item["target"]), []).append(item)
        return collected

    wait_until(lambda: ("delete", "after") in records())
    for act in (("purge", "queue:once"), ("purge", "queue:after"), ("delete", "once")):
        (record,) = records()[act]
        assert (record["details"]["interface"], record["details"]["address"]) == ("rest", "127.0.0.1")


def test_an_administrator_adds_and_removes_logins(lab, admin):
    assert admin.put("/logins/zoe", json={"password": "a long one", "role": "operator"}).status_code == 204
    arguments = {"name": "zoe", "password": "a long one"}
    token = httpx.post(f"{lab.url}/api/v1/tokens", json=arguments, timeout=30).json()["token"]
    zoe = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{lab.url}/api/v1/me", headers=zoe).json()["role"] == "operator"
    with httpx.stream("GET", f"{lab.url}/api/v1/watch/pipeline", headers=zoe, timeout=60) as watching:
        lines = watching.iter_lines()
        assert next(lines) == ": muster"
        assert admin.delete("/logins/zoe").status_code == 204
        received_lines = list(itertools.islice(lines, 9))  # a watch ends with its login, and does not beat on
    assert "event: problem" in received_lines
    assert httpx.get(f"{lab.url}/api/v1/me", headers=zoe).status_code == 401


def test_a_broker_is_started_linked_and_stopped(admin):
    name = admin.get("/brokers").json()["items"][0]["name"]
    made = admin.post("/brokers", json={"name": "edge", "below": name, "storage": False})
    assert made.status_code == 201, made.text
    assert "log_file" not in made.json()
    wait_until(lambda: any(row["near"] == "edge" for row in admin.get("/links").json()["items"]))
    assert admin.delete("/brokers/edge").status_code == 200


# Login


def test_without_a_login_nothing_is_returned(lab):
    for path in (*READS, "/watch/activity", "/logins"):
        answer = httpx.get(f"{lab.url}/api/v1{path}")
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"].startswith("Bearer")
    for method, path, body in ACTS:
        assert httpx.request(method, f"{lab.url}/api/v1{path}", json=body).status_code == 401, path


@pytest.mark.parametrize(
    "header", ["Bearer", "Bearer x", "Basic YWRtaW46YWRtaW4=", "Bearer " + "a" * 9000, "Bearer é"]
)
def test_tokens_that_are_none_are_refused(lab, header):
    answer = httpx.get(f"{lab.url}/api/v1/me", headers={"Authorization": header.encode()})
    assert answer.status_code == 401


def test_a_forged_cookie_is_refused(lab):
    key = (lab.settings.domain.folder / "web" / "key").read_bytes()
    with httpx.Client(base_url=lab.url, timeout=60) as browser:
        form = {"name": "vera", "password": PASSWORDS["vera"], "next": "/"}
        assert browser.post("/login", data=form, headers={"Origin": lab.url}).status_code == 303
        text = browser.cookies["muster-session"]
    mine = sessions.unseal(text, key, now_s=0)

    def me(cookie: str, **more: str) -> httpx.Response:
        return httpx.get(f"{lab.url}/api/v1/me", headers={"Cookie": f"muster-session={cookie}", **more})

    for forged in (
        sessions.seal(msgspec.structs.replace(mine, until=1), key),
        sessions.seal(msgspec.structs.replace(mine, role=sessions.WebRole.ADMIN), b"k" * 32),
        sessions.seal(msgspec.structs.replace(mine, born=mine.born - 1), key),
        sessions.seal(msgspec.structs.replace(mine, name="nobody"), key),
        sessions.seal(msgspec.structs.replace(mine, groups=("ops",)), key),  # no provider is configured
    ):
        assert me(forged).status_code == 401
    assert me("", Authorization=f"Bearer {text}").status_code == 401  # a cookie is no token
    # The role in a cookie does not count: the role of the login does.
    grown = sessions.seal(msgspec.structs.replace(mine, role=sessions.WebRole.ADMIN), key)
    assert me(grown).json()["role"] == "viewer"


def test_a_token_that_was_ended_is_over(lab):
    headers = {"Authorization": f"Bearer {lab.token('vera')}"}
    assert httpx.delete(f"{lab.url}/api/v1/tokens/current", headers=headers).status_code == 204
    assert httpx.get(f"{lab.url}/api/v1/me", headers=headers).status_code == 401


def test_wrong_passwords_are_all_alike_and_soon_have_to_wait(lab):
    arguments = {"name": "nobody", "password": "wrong one"}
    answers: list[httpx.Response] = []
    # On a slow machine a try takes longer than the first waits; these double.
    while len(answers) < 20 and (not answers or answers[-1].status_code != 429):
        answers.append(httpx.post(f"{lab.url}/api/v1/tokens", json=arguments, timeout=60))
    assert {answer.status_code for answer in answers} == {401, 429}
    assert len({answer.text for answer in answers if answer.status_code == 401}) == 1
    assert int(answers[-1].headers["retry-after"]) >= 1
    # Another user of the same address waits too; then the right password ends it.
    wait_until(
        lambda: (
            httpx.post(
                f"{lab.url}/api/v1/tokens", json={"name": "vera", "password": PASSWORDS["vera"]}, timeout=60
            ).status_code
            == 201
        ),
        timeout_s=180,
    )


def raw(
    lab: Running, method: str, path: str, headers: dict[str, str], body: bytes = b""
) -> tuple[int, bytes]:
    """A request as it stands, however strange."""
    place = urlsplit(lab.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port or 0, timeout=30)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static/....//server.py",
        "/static/muster.css%00.py",
        "//etc/passwd",
        "/api/v1/../../etc/passwd",
        "/api/v1/reports/nodes/..%2f..%2f..%2fetc%2fpasswd",
        "/live?page=/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
    ],
)
def test_path_tricks_lead_nowhere(lab, path):
    status, body = raw(lab, "GET", path, {})
    assert status in (303, 401, 404), body
    assert b"root:" not in body
    assert b"import" not in body


def test_a_foreign_host_name_is_refused(lab):
    status, body = raw(lab, "GET", "/login", {"Host": "evil.example"})
    assert status == 400
    assert b"web.names" in body


def test_another_site_cannot_use_the_cookie_of_a_user(lab):
    with httpx.Client(base_url=lab.url, timeout=30) as browser:
        here = {"Origin": lab.url}
        form = {"name": "olga", "password": PASSWORDS["olga"]}
        assert browser.post("/login", data=form, headers=here).status_code == 303
        cookie = next(entry for entry in browser.cookies.jar if entry.name == "muster-session")
        assert cookie.has_nonstandard_attr("HttpOnly")
        assert str(cookie.get_nonstandard_attr("SameSite")).lower() == "strict"
        assert browser.get("/api/v1/me").json()["name"] == "olga"
        act = {"value": "forged"}
        # From another site; without an origin and without the token of a form; with a wrong token.
        for headers in (
            {"Origin": "https://evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
            {},
            {"X-CSRF-Token": "guess"},
        ):
            answer = browser.put("/api/v1/contexts/forged", json=act, headers=headers)
            assert answer.status_code == 403, headers
            form = {"name": "orders", "form": "guess", "back": "/"}
            assert browser.post("/do/purge", data=form, headers=headers).status_code == 403
            assert browser.post("/logout", data={"form": ""}, headers=headers).status_code == 403
        assert browser.get("/api/v1/contexts/forged").status_code == 404
        assert browser.post("/login", data=form).status_code == 403  # no page of ours sent it
        page = browser.get("/contexts").text
        token = page.split('name="form" value="', 1)[1].split('"', 1)[0]
        made = browser.put("/api/v1/contexts/own", json=act, headers={**here, "X-CSRF-Token": token})
        assert made.status_code == 200, made.text


FIELDS = {  # of any form
    **dict.fromkeys(("name", "rule", "about", "key", "id", "group", "type", "operation"), "none"),
    "covers": "rule = 'none'",
    "for_s": "1h",
    "where": "FALSE",
    "manifest": "resources: []",
    "number": "1",
    "role": "viewer",
    "password": "long enough",
    "address": "FALSE",
    "text": "",
    "description": "mine",
    "lifetime_s": "1h",
}
OWN = ("create-token",)  # a viewer may have tokens of its own


def test_no_form_is_accepted_without_its_token_or_from_a_viewer(lab):
    with browsing(lab, "vera") as browser:
        token = browser.get("/").text.split('name="form" value="', 1)[1].split('"', 1)[0]
        assert all(f'"/do/{act}"' in browser.get("/tokens").text for act in OWN)
        for act in forms.ACTS:
            forged = browser.post(f"/do/{act}", data={**FIELDS, "form": "guess", "back": "/find"})
            assert forged.status_code == 403, act
            answer = browser.post(f"/do/{act}", data={**FIELDS, "form": token, "back": "/find"})
            page: Any = lxml.html.fromstring(answer.text)
            (notice,) = page.find_class("notice")
            assert (act, "bad" in notice.get("class")) == (act, act not in OWN), notice.text_content()


def test_a_huge_body_is_refused_with_and_without_its_length(lab):
    status, _ = raw(lab, "POST", "/api/v1/tokens", {"Content-Length": str(1 << 40)})
    assert status == 413
    token = lab.token("olga")

    def chunks() -> Iterator[bytes]:
        for _ in range(64):
            yield b"x" * (1 << 18)

    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        answer = httpx.put(f"{lab.url}/api/v1/contexts/huge", content=chunks(), headers=headers, timeout=60)
        assert answer.status_code == 413
    except httpx.HTTPError:
        pass  # the connection was closed before all of it was sent
    assert httpx.get(f"{lab.url}/api/v1/contexts/huge", headers=headers).status_code == 404


def test_answers_forbid_foreign_script_and_frames(lab):
    headers = httpx.get(f"{lab.url}/login").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/wsman", "/context", "/uddi", "/uddi/inquiry", "/juddiv3/services/inquiry"]
)
def test_no_soap_endpoint_is_served_on_the_port_of_the_dashboard(lab, path):
    answer = httpx.post(f"{lab.url}{path}", content=b"<x/>", headers={"Content-Type": "text/xml"})
    assert answer.status_code == 404, answer.text[:200]
    assert httpx.get(f"{lab.url}{path}?wsdl").status_code == 404


def test_wrong_passwords_are_throttled_for_any_claimed_address(lab):
    """By default, uvicorn trusts X-Forwarded-For of loopback peers."""
    answers = [
        httpx.post(
            f"{lab.url}/api/v1/tokens",
            json={"name": "guessed", "password": f"guess {number}"},
            headers={"X-Forwarded-For": f"192.0.2.{number}"},
            timeout=30,
        )
        for number in range(8)
    ]
    assert [answer.status_code for answer in answers] == [401] * 5 + [429] * 3
    assert int(answers[-1].headers["Retry-After"]) > 0
    assert lab.token("vera")  # who has logged in from there before goes on


@pytest.mark.parametrize(
    "start",
    [
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"GET /login HTTP/1.1\nHost: localhost\n\n",
    ],
)
def test_an_ambiguous_request_ends_the_connection(lab, start):
    with socket.create_connection(("127.0.0.1", httpx.URL(lab.url).port), timeout=10) as client:
        client.sendall(start + b"GET /login HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while piece := client.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_charts_the_map_and_the_search_are_rest_too(lab, vera):
    for place in (
        "/reports/map?metric=machine",
        "/charts/fleet?metric=zone",
        "/charts/machine?metric=extra&name=x",
    ):
        assert vera.get(place).status_code == 200, place  # columns that are no metrics
    wait_until(lambda: vera.get("/reports/nodes").json()["items"])
    for kind, metric, name in (
        ("fleet", "cpu_percent", ""),
        ("group", "cpu_percent", "default"),
        ("zone", "memory_percent", "default"),
        ("machine", "load_1m", "sensor"),
        ("domain", "age", ""),
        ("broker", "messages", "lab-1"),
        ("channel", "reports", "channel"),
        ("queue", "depth", "none"),
        ("pipeline", "batch_s", ""),
    ):
        chart = vera.get(f"/charts/{kind}", params={"metric": metric, "name": name}).json()
        assert all(len(line["values"]) == len(chart["at_ms"]) for line in chart["lines"]), (kind, chart)
    chart = vera.get("/charts/machine", params={"metric": "cpu_percent", "name": "sensor"}).json()
    assert (chart["unit"], [line["name"] for line in chart["lines"]]) == (" %", ["cpu_percent"])
    assert vera.get("/charts/domain", params={"metric": "none"}).status_code == 404
    assert vera.get("/charts/planet", params={"metric": "cpu_percent"}).status_code == 400
    first = vera.get("/reports/map", params={"metric": "cpu_percent"}).json()
    assert first["names"].split("\n") == ["sensor"]
    assert len(base64.b64decode(first["values"])) == first["machines"] == 1
    again = vera.get("/reports/map", params={"layout": first["layout"]}).json()
    assert (again["names"], again["blocks"], again["states"]) == (None, None, ["up"])
    found = {(row["kind"], row["name"]) for row in vera.get("/find", params={"q": "SENS"}).json()["items"]}
    assert ("machine", "sensor") in found
    assert "broker lab-1" in {part["id"] for part in vera.get("/topology").json()["parts"]}


# Requests that mean something else than they say


def test_a_misspelt_parameter_is_refused_not_ignored(olga):
    """Without its filter, this would discard every message of the queue."""
    assert olga.post("/queues/misspelt/messages", json={"text": "kept"}).status_code == 201
    refused = olga.delete("/queues/misspelt/messages", params={"selctor": "amount > 3"})
    assert refused.status_code == 400, refused.text
    assert "selctor" in refused.json()["detail"]
    assert "selector" in refused.json()["hint"]
    assert olga.delete("/queues/misspelt/messages", params={"selector": ""}).json()["purged"] == 1
    past = olga.get("/reports/system", params={"at": 1000, "window_s": 5})  # of a dependency
    assert past.status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/resources/odd", '{"type": "memory", "agent": "local", "config": {"a": "\\ud800"}}'),
        ("DELETE", f"/scheduled-messages/{'9' * 30}", ""),
        ("PUT", "/resources/odd", '{"type": "memory", "agent": "local", "reschedule": {"after": 1}}'),
    ],
)
def test_what_no_service_can_store_is_invalid_input(olga, method, path, body):
    answer = olga.request(method, path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text


def test_a_resource_has_all_fields_of_an_entry_of_a_manifest():
    fields = {field.name for field in msgspec.structs.fields(manifest.ManifestEntry)} - {"name", "count"}
    assert set(resources_rest.DesiredStateBody.model_fields) == fields
