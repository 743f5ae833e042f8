"""The reference page of REST, from the document that describes it. Pure.

A test compares it with docs/reference/rest.md; ``REWRITE=1 pytest tests/web/test_openapi.py`` writes it anew.
"""

from __future__ import annotations

from typing import Any

from muster.web import server

_HEAD = """\
# REST

<!-- Made from the code: REWRITE=1 pytest tests/web/test_openapi.py -->

Everything that the dashboard shows and does, under `/api/v1`. The whole description, with every schema, is
served by the running process at `/api/v1/openapi.json`.

**Logging in.** `POST /api/v1/tokens` with a name and a password gives a bearer token; send it as
`Authorization: Bearer …`. `muster web password NAME --role viewer|operator|admin` lets somebody in. A
viewer reads; an operator also acts; an admin also changes brokers and logins. Every act, and every refusal
of one, is written to the audit under the name of whoever asked.

**Errors** are `application/problem+json` (RFC 9457): `detail` says what is wrong, `hint` what would be
right, `code` is the kind of error for programs.

**Lists** come in pages: `limit` (at most 200) and `cursor`; `next` in the answer is the following cursor,
null at the end. Where a list has no cursor, narrow it with a predicate ([the language](predicates.md)).

**Versions.** Resources, contexts and service entries carry an `ETag`; with `If-Match`, a change is made
only if it is still that version, and else answered with 412.

**Watches** are server-sent events, one JSON document each; a comment comes every 15 s when nothing else
does. A watch ends with its login. A context's events have its version as their id: whoever comes back with
`Last-Event-ID` goes on after it.

A browser that is logged in by its cookie sends the token of its page as `X-CSRF-Token` with whatever
changes something.
"""


def render_page() -> str:
    document = server.rest_application().openapi()
    tags: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            line = f"| `{method.upper()}` | `{path}` | {told['summary']} | {_parameters(told)} |"
            tags.setdefault(told["tags"][0], []).append(line)
    parts = [_HEAD]
    for tag, lines in tags.items():
        head = "| method | path | what | parameters and body |\n|---|---|---|---|"
        parts.append(f"\n## {tag.capitalize()}\n\n{head}\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def _parameters(told: dict[str, Any]) -> str:
    names = [f"`{one['name']}`" for one in told.get("parameters", ()) if one["in"] != "path"]
    body = told.get("requestBody")
    if body:
        schema = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        names.append(f"body: {schema}")
    return ", ".join(names)
