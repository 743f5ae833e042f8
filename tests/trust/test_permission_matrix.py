"""Every role against every class of subjects and every verb, at a real broker, by plain clients."""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from muster.bus.client import client
from muster.core import errors
from muster.trust import keyring
from muster.trust.permissions import roles
from tests.trust import matrix, servers

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "security.md"
R = roles.Role

RECEIVES = {"receive replies to it", "receive in its own inbox"}
EVERYONE = RECEIVES | {
    "send requests that read",
    "reply as itself",
    "receive messages addressed to it",
    "receive announcements",
}
SPEAKS = {"send requests that change something", "request admission as an agent"}
TOPICS = {"publish on users' topics", "reply on users' topics", "receive on users' topics"}
SERVICE = {"create the audit where it is missing"}
MANAGE = {
    *("renew as a manager", "command agents", "announce for manage", "reply for manage"),
    *("write manage's log and audit", "receive requests to manage", "receive heartbeats sent to it"),
}
CONNECTED = {"request the list of connections", "receive connection events"}
#: What each role may beyond `EVERYONE`. Written by hand: the code must agree, and so must the broker.
MAY: dict[roles.Role, set[str]] = {
    R.AGENT: SPEAKS,
    R.MANAGER: SPEAKS | MANAGE - {"write manage's log and audit", "receive requests to manage"},
    R.REGISTRY: SPEAKS
    | SERVICE
    | MANAGE
    | CONNECTED
    | {"write manage's leases", "write the registry's records", "read the registry's records"}
    | {"receive the registry's records", "consume alerts"},
    R.BOOTSTRAP: SPEAKS
    | SERVICE
    | MANAGE
    | {"reply for bus and audit", "list streams", "change the audit's limits", "announce connections"}
    | {"read the audit"},
    R.NOTIFIER: SPEAKS
    | SERVICE
    | CONNECTED
    | {"notify receivers", "reply for notify", "write notify's leases"}
    | {"write notify's bucket"},
    R.CHANNEL: SPEAKS
    | SERVICE
    | {"send batches of reports", "read reports", "write monitor's bucket", "receive reports"},
    R.PIPELINE: SPEAKS
    | SERVICE
    | CONNECTED
    | {"write pipeline's leases"}
    | {"send batches of reports", "raise alerts", "reply for pipeline", "read reports", "consume alerts"}
    | {"receive reports", "receive alerts"},
    R.GATEWAY: SPEAKS
    | SERVICE
    | TOPICS
    | CONNECTED
    | {"reply for message", "prune messages", "write message's leases", "receive requests to message"},
    R.INFORMATION_NODE: SPEAKS | SERVICE | {"reply for inform"},
    R.RESPONDER: SPEAKS | {"consume alerts"},
    R.AUTHORITY: SPEAKS,
    R.USER: SPEAKS | TOPICS,
    R.VIEWER: set(),
    R.WEB: SPEAKS
    | SERVICE
    | {"write web's log and audit", "read the audit", "read reports", "consume alerts"}
    | {"request the list of connections", "receive alerts", "receive the audit"},
}
OPERATOR = (
    SPEAKS
    | TOPICS
    | CONNECTED
    | {
        attempt.name
        for attempt in matrix.ATTEMPTS
        if attempt.subject.startswith(("$JS.API.", "$JS.ACK.", "$KV."))
    }
    | {
        attempt.name
        for attempt in matrix.ATTEMPTS
        if attempt.receives and attempt.subject.startswith("muster.")
    }
    | {"send batches of reports"}
) - {"receive storage requests", "receive key/value changes"}
MAY[R.OPERATOR] = OPERATOR
MAY = {role: EVERYONE | allowed for role, allowed in MAY.items()}
MAY[R.JOINING] = RECEIVES | {"request admission as an agent"}  # and nothing else
MAY[R.READER] = RECEIVES | {"read reports"}  # and nothing else

#: Subjects to send to oneself, or to a service, with a reply subject of one's choice.
OWN = ("_R.me.other.s.1", "muster.manage.from.me.read.get", "muster.manage.from.me.domain.enrol")

#: Roles that must not be able to use the broker or a service as a deputy.
UNPRIVILEGED = (R.AGENT, R.USER, R.VIEWER, R.AUTHORITY, R.JOINING)


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> keyring.Keyring:
    """Each role in a domain of its own holds the identity ``me``: one broker serves all of them."""
    made = keyring.Keyring.create(tmp_path_factory.mktemp("matrix") / "keys", "north")
    for role in matrix.clients():
        made.add_domain(role.value)
        made.issue(matrix.ME, role, domain=role.value)
    for identity, role in (
        ("v", R.VIEWER),
        ("u", R.USER),
        ("r", R.REGISTRY),
        ("op", R.OPERATOR),
        ("l", R.LINK),
    ):
        made.issue(identity, role)
    made.issue("m", R.USER, bearer=True)
    return made


@pytest.fixture
async def broker(trust: keyring.Keyring, tmp_path: pathlib.Path) -> AsyncIterator[servers.SignedServer]:
    listeners: dict[str, Any] = {
        "websocket": {"listen": "127.0.0.1:-1", "no_tls": True},
        "mqtt": {"listen": "127.0.0.1:-1"},
        "leafnodes": {"listen": "127.0.0.1:-1"},
    }
    async with servers.server(tmp_path, trust, **listeners) as running:
        # It logs each refusal, and would wait for a reader when the pipe is full.
        reading = asyncio.create_task(running.line("no such line"))
        yield running
        reading.cancel()
        await asyncio.wait([reading])


@pytest.mark.parametrize("role", matrix.clients())
def test_the_code_allows_what_is_expected(role):
    allowed = {attempt.name for attempt in matrix.ATTEMPTS if matrix.is_allowed(role, attempt)}
    assert allowed == MAY[role]


async def test_the_broker_allows_what_is_expected(broker, trust):
    wrong = []
    for role in matrix.clients():
        async with servers.line(broker, trust.credentials(matrix.ME, domain=role.value)) as (line, answer):
            assert not answer, (role, answer)
            for attempt in matrix.ATTEMPTS:
                expected = attempt.name in MAY[role]
                forms = [(line.publish, attempt.subject)]
                if attempt.receives:  # alone, and as one of a group, which would take another's messages
                    forms = [(line.subscribe, attempt.subject), (line.subscribe, f"{attempt.subject} group")]
                for act, subject in forms:
                    complaint = await act(subject)
                    if ("Permissions Violation" in complaint) == expected or (complaint and expected):
                        wrong.append((role.value, attempt.name, complaint))
    assert not wrong


@pytest.mark.parametrize("role", UNPRIVILEGED)
async def test_no_reply_subject_and_no_header_gives_a_permission(broker, trust, role):
    """What is sent with a forbidden reply subject, or with the broker's own headers, opens nothing."""
    who = trust.credentials(matrix.ME, domain=role.value)
    forbidden = [item for item in matrix.ATTEMPTS if not item.receives and item.name not in MAY[role]]
    may = [item.subject for item in matrix.ATTEMPTS if not item.receives and item.name in MAY[role]]
    headers = (
        *("Nats-Msg-Id: 1", "Nats-Stream: s", "Nats-Sequence: 1", "Nats-Rollup: all", "Nats-Rollup: sub"),
        *("Nats-Expected-Stream: s", "Nats-Expected-Last-Sequence: 0", "Nats-Expected-Last-Msg-Id: 1"),
        "Nats-Expected-Last-Subject-Sequence: 0",
    )
    async with servers.line(broker, who) as (line, _):
        for number, own in enumerate(("muster.manage.to.me.x", "_R.*.me.>", "_INBOX.me.>")):
            refused = await line.say(f"SUB {own} {number + 1}")
            assert bool(refused) == (role is R.JOINING and number == 0)
        for attempt in forbidden:
            for own in (name for name in OWN if name in may):
                refused = await line.say(f"PUB {own} {attempt.subject} 0\r\n")
                assert bool(refused) == attempt.subject.startswith("$JS.ACK.")  # the broker's own check
            assert "Permissions Violation" in await line.publish(attempt.subject), attempt
            for header in headers:
                lines = f"NATS/1.0\r\n{header}\r\n\r\n"
                sentence = f"HPUB {attempt.subject} {len(lines)} {len(lines)}\r\n{lines}"
                assert "Permissions Violation" in await line.say(sentence), (attempt, header)


async def test_listeners_take_only_their_own_kind_of_client(broker, trust):
    """A link's credentials open no client connection, a bearer's only MQTT, and others no MQTT."""
    assert "Authorization Violation" in await servers.knock(broker, trust.credentials("l"))
    assert "Authorization Violation" in await servers.knock(broker, trust.credentials("m"))
    assert not await servers.knock(broker, trust.credentials("u"))
    for role in matrix.clients():
        assert set(roles.DUTIES[role].connections) == {"STANDARD", "WEBSOCKET"}
        assert roles.limits(role, matrix.ME, bearer=True).allowed_connection_types == ("MQTT",)
    async with await client.connect(
        [f"ws://127.0.0.1:{broker.ports['websocket']}"], creds=trust.credentials("v")
    ) as viewer:
        with pytest.raises(errors.Forbidden):
            await viewer.subscribe("muster.>")


def test_the_page_is_made_from_the_code():
    text = PAGE.read_text()
    for name, made in (
        ("roles", matrix.duties()),
        ("matrix", matrix.table()),
        ("indirect", matrix.indirect()),
    ):
        mark = re.compile(rf"(<!-- made:{name} -->\n)(.*?)(<!-- /made -->)", re.DOTALL)
        matches = mark.search(text)
        assert matches, f"docs/security.md has no place for {name}"
        if os.environ.get("REWRITE"):
            text = f"{text[: matches.start(2)]}{made}\n{text[matches.end(2) :]}"
            PAGE.write_text(text)
        elif matches[2] != f"{made}\n":
            pytest.fail("REWRITE=1 pytest tests/trust/test_permission_matrix.py writes it anew")
