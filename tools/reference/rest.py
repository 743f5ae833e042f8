"""Generates the reference page of the REST API from its OpenAPI document."""

from __future__ import annotations

from typing import Any

from muster.web import server

_HEAD = """\
# REST API

The API provides all data and operations of the dashboard under `/api/v1`. The running process serves the
complete OpenAPI document, with all schemas, at `/api/v1/openapi.json`. Terms are explained in the
[glossary](../glossary.md).

**Authentication.** Send an API token as `Authorization: Bearer …`. `POST /api/v1/tokens` with a name and a
password returns one, `muster web token create NAME` prints one, and people create theirs on the page API
tokens. A token has at most the role of its owner. Scopes limit it further: `alerts` permits the section
alerts of this page, `alerts:read` only what a viewer may do there. `muster web password NAME --role
viewer|operator|admin` creates a login. A viewer
reads; an operator also executes operations; an admin also changes brokers and logins. The activity log
records every operation, and every rejected one, with the name of the caller.

**Errors** are `application/problem+json` (RFC 9457): `detail` describes the error, `hint` a remedy, and
`code` is the kind of error for programs.

**Lists** are paginated with `limit` (at most 200) and `cursor`. `next` in the response is the cursor of the
following page, or null at the end. Lists without a cursor can be filtered with a predicate
([the language](predicates.md)).

**Versions.** Resources, contexts and service entries have an `ETag`. With `If-Match`, a change is made only
if the version still matches; otherwise the response is 412.

**Watches** are server-sent events, one JSON document each. A comment is sent after 15 s without an event. A
watch ends when its login ends. The events of a context have its version as their id: with `Last-Event-ID` a
client continues after that version.

A browser that is authenticated by its cookie sends the token of the page as `X-CSRF-Token` with every request
that changes something.
"""


def render_page() -> str:
    document = server.rest_application().openapi()
    tags: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            line = f"| `{method.upper()}` | `{path}` | {operation['summary']} | {_parameters(operation)} |"
            tags.setdefault(operation["tags"][0], []).append(line)
    parts = [_HEAD]
    for tag, lines in tags.items():
        head = "| method | path | description | parameters and body |\n|---|---|---|---|"
        parts.append(f"\n## {tag.capitalize()}\n\n{head}\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def _parameters(operation: dict[str, Any]) -> str:
    names = [
        f"`{parameter['name']}`" for parameter in operation.get("parameters", ()) if parameter["in"] != "path"
    ]
    body = operation.get("requestBody")
    if body:
        schema = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        names.append(f"body: {schema}")
    return ", ".join(names)
