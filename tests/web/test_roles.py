"""Each role at each operation of REST, against the web process of a domain.

A new operation has no line in the table, and fails here until the table says which roles may call it.
Requests change nothing where they are allowed: they name missing resources, or another version.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from muster.app import identities
from muster.trust.permissions import roles
from muster.web import server
from tests.web.conftest import PASSWORDS, Api, Running

VIEWER, OPERATOR, ADMIN = "viewer", "operator", "admin"
PEOPLE = {VIEWER: "vera", OPERATOR: "olga", ADMIN: "admin"}
EVENT = {"type": "none", "content": {}}
STALE = {"If-Match": '"999999"'}

#: What may call an operation that is not a plain GET, which a viewer may, and what it is sent.
TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "GET /logins": (ADMIN, {}),
    "PUT /logins/{name}": (ADMIN, {"json": {"password": "long enough"}}),
    "DELETE /logins/{name}": (ADMIN, {}),
    "POST /brokers": (ADMIN, {"json": {"name": "b-9", "below": "none"}}),
    "DELETE /brokers/{name}": (ADMIN, {}),
    "POST /links": (ADMIN, {"json": {"near": "none", "far": "none"}}),
    "DELETE /links": (ADMIN, {"params": {"id": "none"}}),
    "PUT /resources/{name}": (OPERATOR, {"json": {"type": "memory", "agent": "none"}, "headers": STALE}),
    "DELETE /resources/{name}": (OPERATOR, {}),
    "POST /resources/{name}/executions": (OPERATOR, {"json": {"operation": "restart"}}),
    "GET /resources/{name}/logs": (OPERATOR, {}),
    "GET /logs": (OPERATOR, {"params": {"where": "name = 'none'"}}),
    "GET /watch-logs": (OPERATOR, {"params": {"name": "none"}}),
    "POST /resources/{name}/drain": (OPERATOR, {}),
    "POST /resources/{name}/undrain": (OPERATOR, {}),
    "POST /agents/{name}/drain": (OPERATOR, {}),
    "POST /agents/{name}/undrain": (OPERATOR, {}),
    "POST /rollouts": (OPERATOR, {"json": {"where": "name = 'none'", "operation": "restart"}}),
    "POST /rollouts/{id}/pause": (OPERATOR, {}),
    "POST /rollouts/{id}/resume": (OPERATOR, {}),
    "POST /rollouts/{id}/abort": (OPERATOR, {}),
    "POST /groups/{group}/undo": (OPERATOR, {}),
    "POST /moves": (OPERATOR, {}),
    "GET /jobs/{name}/runs": (OPERATOR, {}),
    "POST /jobs/{name}/runs": (OPERATOR, {}),
    "POST /manifests": (OPERATOR, {"json": {"manifest": "resources: {}"}}),
    "POST /alerts/resolutions": (OPERATOR, {"json": {"rule": "none", "about": "none"}}),
    "POST /fleet/removals": (OPERATOR, {"json": {"machines": ["none"]}}),
    "POST /alerts/acknowledgements": (OPERATOR, {"json": {"rule": "none", "about": "none"}}),
    "POST /silences": (OPERATOR, {"json": {"covers": "rule = 'none'", "for_s": 1}}),
    "DELETE /silences/{id}": (OPERATOR, {}),
    "POST /contexts": (OPERATOR, {"json": {"value": "", "lease_s": 1}}),
    "PUT /contexts/{key}": (OPERATOR, {"json": {"value": ""}, "headers": STALE}),
    "DELETE /contexts/{key}": (OPERATOR, {}),
    "PUT /services/{id}": (OPERATOR, {"json": {"name": "none"}, "headers": STALE}),
    "DELETE /services/{id}": (OPERATOR, {}),
    "GET /notify/events": (OPERATOR, {}),
    "GET /notify/events/{id}": (OPERATOR, {}),
    "GET /alerts/loop": (OPERATOR, {"params": {"rule": "none", "about": "none"}}),
    "POST /notify/events": (OPERATOR, {"json": {"event": EVENT}}),
    "DELETE /queues/{name}/messages": (OPERATOR, {}),
    "POST /queues/{name}/messages": (OPERATOR, {"json": {"text": "", "properties": {"no name": 1}}}),
    "POST /queues/{name}/moves": (OPERATOR, {"json": {"to": "queue:none"}}),
    "POST /sql": (OPERATOR, {"json": {"query": "SELECT 1"}}),
    "DELETE /scheduled-messages/{number}": (OPERATOR, {}),
    "POST /plans": (VIEWER, {"json": {"manifest": "resources: {}"}}),
    "POST /notify/who": (VIEWER, {"json": {}}),
    "POST /notify/explain": (VIEWER, {"json": {"event": EVENT, "receiver": "a/b"}}),
    "POST /notify/check": (VIEWER, {"json": {"policy": "TRUE"}}),
    "DELETE /tokens/current": (VIEWER, {}),
    "DELETE /tokens/{id}": (VIEWER, {}),
}
OPEN = {"POST /tokens"}  # it is the login


def operations() -> dict[str, tuple[str, dict[str, Any]]]:
    collected = {}
    for path, methods in server.rest_application().openapi()["paths"].items():
        for method in methods:
            name = f"{method.upper()} {path.removeprefix(server.API)}"
            if name not in OPEN:
                collected[name] = TABLE.get(name, (VIEWER, {})) if method == "get" else TABLE[name]
    return collected


def call(client: httpx.Client, name: str, arguments: dict[str, Any]) -> int:
    """The status alone: some answers have no end."""
    method, _, path = name.partition(" ")
    for parameter in ("name", "id", "key", "service", "kind", "what", "group"):
        path = path.replace(f"{{{parameter}}}", "none")
    path = path.replace("{number}", "1")
    with client.stream(method, path, **arguments) as answer:
        return answer.status_code


def test_the_table_has_every_operation_that_changes_something():
    assert set(TABLE) <= set(operations())


def test_every_route_needs_a_login(lab: Running):
    with httpx.Client(base_url=f"{lab.url}{server.API}", timeout=60) as client:
        statuses = {name: call(client, name, arguments) for name, (_, arguments) in operations().items()}
    assert statuses == dict.fromkeys(operations(), 401)


@pytest.mark.parametrize("role", PEOPLE)
def test_each_role_has_the_rights_of_the_table(lab: Running, role: str):
    rank = list(PEOPLE)
    wrong = {}
    with Api(lab, PEOPLE[role]) as client:
        for name, (needed, arguments) in operations().items():
            if name == "DELETE /tokens/current":
                arguments = {"headers": {"Authorization": f"Bearer {lab.token(PEOPLE[role])}"}}
            status = call(client, name, arguments)
            allowed = rank.index(role) >= rank.index(needed)
            if status == 401 or (status == 403) == allowed:
                wrong[name] = status
    assert wrong == {}


def test_a_viewer_reads_the_activity_log_over_rest_and_not_on_the_bus(lab: Running):
    with Api(lab, PEOPLE[VIEWER]) as client:
        assert [call(client, f"GET {path}", {}) for path in ("/activity", "/watch/activity")] == [200, 200]
    on_the_bus = roles.limits(roles.Role.VIEWER, "vera")
    assert not any("decision" in subject or subject == "muster.>" for subject in on_the_bus.sub.allow)
    for scopes, statuses in {
        ("alerts:read",): [403, 403],
        ("activity:read",): [200, 403],
        ("watches:read",): [403, 200],
    }.items():
        arguments = {"name": "vera", "password": PASSWORDS["vera"], "scopes": scopes}
        token = httpx.post(f"{lab.url}{server.API}/tokens", json=arguments, timeout=30).json()["token"]
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=f"{lab.url}{server.API}", headers=headers, timeout=60) as client:
            paths = ("/activity", "/watch/activity")
            assert [call(client, f"GET {path}", {}) for path in paths] == statuses, scopes


def test_logins_of_other_roles_have_no_place(lab: Running):
    trust = identities.open_keyring(lab.settings)
    for role in (roles.Role.USER, roles.Role.AGENT):
        trust.passwords().set(f"a-{role}", role, "a long secret")
        arguments = {"name": f"a-{role}", "password": "a long secret"}
        assert httpx.post(f"{lab.url}{server.API}/tokens", json=arguments, timeout=30).status_code == 403
        trust.passwords().remove(f"a-{role}")
