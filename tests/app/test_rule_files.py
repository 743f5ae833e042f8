"""Files of rules that settings name are checked before a domain starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.app import settings as app_settings
from muster.app.operations import rule_files
from muster.core import errors
from muster.core.settings import loader

RULES = "rules: [{name: hot, scope: node, when: cpu_percent > 95, notify: [team]}]\n"
CONTACTS = "contacts: {team: {mail: [ann@example.org]}}\n"
RESPONSES = 'responses: [{alert: hot, event: command, to: "host = {name}"}]\n'
REACTIONS = "reactions: [{where: type = 'process', model: Server, policy: command, operations: [restart]}]\n"


def load(folder: Path, **texts: str) -> app_settings.Settings:
    """Settings that name a file for each text."""
    sections = {"rules": "pipeline", "responses": "responder", "reactions": "reactions"}
    lines = ["[pipeline]", 'mail_allowed = ["@example.org"]', 'mail_server = "127.0.0.1:25"']
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
        header = [] if name == "rules" else [f"[{sections[name]}]"]
        lines += [*header, f'rules = "{name}.yaml"']
    file = folder / "muster.toml"
    file.write_text("\n".join(lines) + "\n")
    return loader.load(app_settings.Settings, file=file)


def test_valid_files_are_listed(tmp_path: Path):
    settings = load(tmp_path, rules=RULES + CONTACTS, responses=RESPONSES, reactions=REACTIONS)
    names = [Path(name).name for name in rule_files.check(settings)]
    assert names == ["rules.yaml", "responses.yaml", "reactions.yaml"]
    assert rule_files.check(load(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("rules", RULES, "notifies 'team', which is not defined"),
        ("rules", RULES.replace("node", "nde") + CONTACTS, "scope"),
        ("responses", "responses: [{alert: hot}]", "responses.yaml: not a file of responses"),
        ("reactions", REACTIONS.replace("type =", "type = ="), "reactions.yaml: reaction 1: where"),
    ],
)
def test_an_invalid_file_is_named(tmp_path: Path, name: str, text: str, error: str):
    with pytest.raises(errors.InvalidInput, match=error):
        rule_files.check(load(tmp_path, **{name: text}))


@pytest.mark.parametrize("name", ["rules", "responses", "reactions"])
def test_a_missing_file_is_named(tmp_path: Path, name: str):
    settings = load(tmp_path, **{name: ""})
    (tmp_path / f"{name}.yaml").unlink()
    with pytest.raises(errors.InvalidInput, match=f"{name}.yaml"):
        rule_files.check(settings)
