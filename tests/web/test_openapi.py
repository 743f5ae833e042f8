"""REST against its OpenAPI document: valid requests get documented replies."""

from __future__ import annotations

import traceback
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks

from muster.web import server
from tests.web.conftest import Api, Running
from tools.reference import rest as reference

EXCLUDED = (
    "/api/v1/tokens",  # each costs what checking a password costs, and soon has to wait
    "/api/v1/tokens/current",  # ends the login that the others use
    "/api/v1/logins/{name}",
    "/api/v1/watch/{what}",  # without end
    "/api/v1/watch-context/{key}",
    "/api/v1/watch-logs",
)
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
AWAY = (501, 503, 504)  # a part that this domain does not run


def _run(lab: Running, examples: int) -> dict[str, int]:
    document = schemathesis.openapi.from_url(f"{lab.url}/api/v1/openapi.json")
    token = lab.token("admin")
    counts: dict[str, int] = {}
    faults: list[str] = []
    for all_operation in document.get_all_operations():
        assert isinstance(all_operation, Ok), all_operation
        operation: Any = all_operation.ok()
        if operation.path in EXCLUDED:
            continue
        # What fits the document and what does not: both are answered as it says, never by a crash.
        fitting, unfit = (operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)

        @hypothesis.given(case=hypothesis.strategies.one_of(fitting, unfit))
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        )
        def check_case(case: Any) -> None:
            answer = case.call(headers={"Authorization": f"Bearer {token}"}, timeout=60)
            counts[case.operation.label] = counts.get(case.operation.label, 0) + 1
            away = answer.status_code in AWAY
            case.validate_response(answer, checks=[*CHECKS, *([] if away else [not_a_server_error])])

        try:
            check_case()
        except Exception as error:  # noqa: BLE001  (all faults are reported together)
            faults.append(f"{operation.label}: {''.join(traceback.format_exception(error))[-3000:]}")
    assert not faults, "\n\n".join(faults)
    return counts


def test_requests_that_match_the_document_get_documented_replies(lab):
    assert len(_run(lab, examples=2)) > 45


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_requests_that_fit_the_document(lab):
    assert len(_run(lab, examples=60)) > 45


def test_the_document_names_every_problem_and_how_to_log_in(lab):
    with Api(lab, "vera") as vera:
        document = vera.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    for path, methods in document["paths"].items():
        for method, reported in methods.items():
            assert reported["summary"], (method, path)
            problem = reported["responses"]["404"]["content"]["application/problem+json"]
            assert problem["schema"] == {"$ref": "#/components/schemas/Problem"}
    schemas = document["components"]["schemas"]
    assert {"Alert", "Decision", "NodeReport", "SystemReport", "Problem"} <= set(schemas)


def test_the_reference_page_has_every_operation():
    page = reference.render_page()
    operations = [
        (method.upper(), path)
        for path, methods in server.rest_application().openapi()["paths"].items()
        for method in methods
    ]
    assert len(operations) > 60
    assert [operation for operation in operations if "| `{}` | `{}` |".format(*operation) not in page] == []
