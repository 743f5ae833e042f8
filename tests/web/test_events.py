"""One event and the loop around it: the alert, the event that answers it, its receivers, their operations."""

from __future__ import annotations

from typing import Any

import pytest

from muster.bus import api
from muster.core import messages
from muster.notify import client as notify
from muster.pipeline import protocol
from muster.trust.permissions import roles
from muster.web.data import event_log
from tests.loop import test_reactions
from tests.web import conftest
from tests.web.conftest import Api, wait_until

RESPONSES = (
    "responses: [{alert: infected, event: command, content: {operation: restart}, "
    "to: \"application = 'shop'\"}]"
)


def change(number: int) -> bytes:
    return messages.encode(test_reactions.alert(number))


async def test_the_tail_of_a_stream_reads_each_message_once(bus, monkeypatch):
    monkeypatch.setattr(event_log, "SEARCHED", 3)
    tail = event_log.StreamTail("log", messages.Alert)
    assert await tail.read(bus) == []
    stream = await bus.stream(api.StreamSettings("log", ("log.>",)))
    decoded: list[bytes] = []
    whole = messages.decode

    def counted(data: bytes, kind: Any) -> Any:
        decoded.append(data)
        return whole(data, kind)

    monkeypatch.setattr(messages, "decode", counted)
    for number in range(1, 3):
        await stream.publish("log.a", change(number))
    assert [place for place, _ in await tail.read(bus)] == [1, 2]
    await stream.publish("log.a", b"no alert")
    for number in range(4, 6):
        await stream.publish("log.a", change(number))
    assert [place for place, _ in await tail.read(bus)] == [4, 5]
    assert [place for place, _ in await tail.read(bus)] == [4, 5]
    assert len(decoded) == 5
    monkeypatch.setattr(event_log, "BYTES_MAX", len(change(1)) + 1)
    await stream.publish("log.a", change(6))
    assert [place for place, _ in await tail.read(bus)] == [6]


@pytest.mark.timeout(300)
async def test_an_alert_is_followed_to_the_operation_that_answers_it(tmp_path, visit):
    (tmp_path / "responses.yaml").write_text(RESPONSES)
    (tmp_path / "reactions.yaml").write_text(test_reactions.REACTIONS)
    extra = (
        f'[responder]\nrules = "{tmp_path / "responses.yaml"}"\n'
        f'[reactions]\nrules = "{tmp_path / "reactions.yaml"}"\n'
    )
    running = conftest.start(tmp_path / "home", extra)
    try:
        with Api(running, "olga") as olga, Api(running, "vera") as vera:
            manifest = "resources: [{name: web, type: memory, agent: local, group: shop}]"
            wait_until(lambda: olga.get("/agents").json()["items"])
            assert olga.post("/manifests", json={"manifest": manifest}).status_code == 200
            wait_until(lambda: olga.get("/resources/web").json().get("state") == "up")
            async with (
                await running.connect("ann", roles.Role.OPERATOR) as bus,
                notify.NotifyClient(bus) as mine,
            ):
                for model in (test_reactions.SERVER, test_reactions.COMMAND):
                    await mine.define(model)
            wait_until(lambda: olga.get("/receivers").json()["items"], timeout_s=90)
            for prefix, count in (("boot", 1), ("*trap/w", 1), ("trap/w", 0), ("*none", 0)):
                listed = olga.get("/receivers", params={"prefix": prefix}).json()["items"]
                assert (prefix, len(listed)) == (prefix, count)
            found = olga.get("/find", params={"q": "trap/w"}).json()["items"]
            assert [thing["page"] for thing in found] == ["/playground?receiver=bootstrap%2Fweb"]
            async with await running.connect("pipeline", roles.Role.PIPELINE) as bus:
                stream = await bus.stream(protocol.streams()[1])
                data = messages.encode(test_reactions.alert(1))
                await stream.publish("muster.pipeline.from.pipeline.alert.infected", data)

            def loop() -> Any:
                answer = olga.get("/alerts/loop", params={"rule": "infected", "about": "node:n1"})
                steps = answer.json().get("steps", [])
                return steps if any(step["what"] == "exec" for step in steps) else None

            steps = wait_until(loop)
            assert [step["what"] for step in steps] == ["alert", "event", "matched", "exec"]
            assert [step["outcome"] for step in steps] == ["firing", "", "", "done"]
            (id,) = {step["event"] for step in steps} - {""}
            trace = wait_until(
                lambda: (made := olga.get(f"/notify/events/{id}").json())["waiting"] == [] and made
            )
            assert (trace["event"]["type"], trace["event"]["receivers"]) == ("command", 1)
            assert trace["receivers"] == ["bootstrap/web"]
            assert [step["what"] for step in trace["steps"]] == ["alert", "event", "matched", "exec"]
            assert vera.get(f"/notify/events/{id}").status_code == 403
            assert olga.get("/notify/events/none").status_code == 404
        here = await visit("olga", running=running)
        await here.open("/loop?rule=infected&about=node:n1")
        await here.page.wait_for_selector("#steps tbody >> text=restart")
        await here.page.click("#steps tbody a:text-is('Event')")
        await here.page.wait_for_selector("#trace >> text=all have acknowledged it")
        await here.open("/activity?what=exec")
        await here.page.click("#rows a:text-is('Event')")
        await here.page.wait_for_selector("#trace >> text=bootstrap/web")
    finally:
        conftest.stop(running)
