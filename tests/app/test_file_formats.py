"""The formats of files: examples that are accepted, schemas that agree with the readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from muster.app import file_formats
from muster.core import errors
from muster.manage.adapters import plugins
from tests.cli import driver
from tools.reference import file_formats as file_formats_page

NAMES = list(file_formats.FORMATS)


def accepts(name: str, document: Any) -> bool:
    return bool(jsonschema_rs.validator_for(file_formats.schema(name)).is_valid(document))


def test_the_page_has_every_example_and_every_field_of_a_schema():
    page = file_formats_page.render_page()
    for name, form in file_formats.FORMATS.items():
        assert form.example.rstrip() in page
        kinds = file_formats.schema(name)["$defs"].values()
        fields = {field for kind in kinds for field in kind.get("properties", ())}
        assert [
            field for field in sorted(fields) if f"| `{field}` |" not in page and f"\n{field}:" not in page
        ] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_example_is_accepted_by_the_reader_and_by_the_schema(name: str):
    form = file_formats.FORMATS[name]
    form.check(form.example)
    assert accepts(name, yaml.safe_load(form.example))
    jsonschema_rs.meta.validate(file_formats.schema(name))


def test_the_example_of_a_manifest_has_every_type():
    entries = yaml.safe_load(file_formats.MANIFEST)["resources"]
    assert {entry["type"] for entry in entries} == plugins.BUILT_IN.keys() - {"memory"}


PROCESS = {"name": "a", "type": "process", "agent": "local", "config": {"command": ["x"]}}


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("manifest", {"resources": [{**PROCESS, "config": {}}]}),
        ("manifest", {"resources": [{**PROCESS, "config": {"command": ["x"], "comand": 1}}]}),
        ("manifest", {"resources": [{**PROCESS, "config": {"command": ["x"], "stop_s": -1}}]}),
        ("manifest", {"resources": [{**PROCESS, "config": {"command": ["x"], "health": {"kind": "ping"}}}]}),
        ("manifest", {"resources": [{**PROCESS, "type": "proces"}]}),
        ("manifest", {"resources": [{**PROCESS, "where": "TRUE"}]}),
        ("manifest", {"resources": [{"name": "a", "type": "memory"}]}),
        ("manifest", {"resources": [{**PROCESS, "name": "a b"}]}),
        ("manifest", {"topologies": [{"name": "a", "shape": "cube", "size": 3, "agent": "local"}]}),
        ("manifest", {"resource": []}),
        ("rules", {"rules": [{"name": "a", "scope": "planet", "when": "TRUE"}]}),
        ("rules", {"rules": [{"name": "a", "scope": "node"}]}),
        ("rules", {"rules": [{"name": "a", "scope": "node", "when": "age_s > 1", "for": []}]}),
        ("responses", {"responses": [{"alert": "a", "event": "b"}]}),
        ("reactions", {"reactions": [{"where": "TRUE", "model": "M"}]}),
    ],
)
def test_what_the_reader_refuses_the_schema_refuses_too(name: str, document: Any):
    with pytest.raises(errors.InvalidInput):
        file_formats.FORMATS[name].check(yaml.safe_dump(document))
    assert not accepts(name, document)


def test_the_command_prints_schemas_and_examples(tmp_path: Path):
    for name in NAMES:
        written = json.loads(json.dumps(file_formats.schema(name)))
        assert driver.quick("schema", name, home=tmp_path).json() == written
        printed = driver.quick("schema", name, "--example", home=tmp_path)
        assert printed.out == file_formats.FORMATS[name].example
    assert driver.quick("schema", home=tmp_path).json()["title"] == "Manifests"
    assert yaml.safe_load(driver.quick("schema", "rules", "-o", "yaml", home=tmp_path).out)["title"]
    assert driver.quick("schema", "poems", home=tmp_path).code == 2
