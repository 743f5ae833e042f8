from __future__ import annotations

import subprocess
from typing import Any

import pytest

from muster.core import errors
from tests.cli import driver

MODELS = """
WebServer = { String application; float load }
Controller = { String entity; int _trust_level }
event alert = { int threat_level }
"""
POLICY = "alert AND threat_level >= 4 AND sender._trust_level >= 2"


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    home = driver.init(tmp_path_factory.mktemp("notify") / "home")
    started = driver.run("up", "--detach", home=home)
    assert started.code == 0, started.err
    (home / "models.txt").write_text(MODELS)
    defined = driver.quick("notify", "define", home / "models.txt", home=home)
    assert defined.code == 0, defined.err
    yield home
    assert driver.run("down", home=home).code == 0


@pytest.fixture
def listener(up):
    """A receiver that waits for one event."""
    child = subprocess.Popen(
        driver.command_line(
            *("notify", "listen", "--as", "web", "--model", "WebServer", "--state", "application=IIS"),
            *("--state", "load=0.9", "--policy", POLICY, "--count", "1", "--timeout", "60", "-o", "json"),
        ),
        env=driver.environment(up),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    assert "listening as admin/web" in child.stderr.readline()
    yield child
    child.kill()
    child.communicate()


def test_send_who_explain_and_grants_on_the_command_line(up, listener):
    def ask(*words: str) -> Any:
        result = driver.quick(*words, "-o", "json", home=up)
        assert result.code == 0, result.err
        return result.json()

    assert ask("notify", "receivers")[0]["receiver"] == "admin/web"
    assert ask("notify", "who", "load > 0.8")["receivers"] == ["admin/web"]
    near = ask("notify", "who", "load > 0.95")
    assert (near["count"], near["near"][0]["receiver"]) == (0, "admin/web")

    why = ask("notify", "explain", "alert threat_level=4", "admin/web")
    assert (why["delivered"], why["sender"]["holds"]) == (False, False)
    serial = ask("authority", "grant", "admin", "_trust_level=3")["serial"]
    assert ask("notify", "explain", "alert threat_level=4", "admin/web")["delivered"]
    listed = ask("authority", "list")
    assert [(row["holder"], row["status"]) for row in listed] == [("admin", "valid")]

    ask("notify", "send", "--to", "application = 'IIS' AND load > 0.8", "--event", "alert", "threat_level=4")
    out, _ = listener.communicate(timeout=30)
    assert '"threat_level": 4' in out

    unknown = f"{'-' if serial[0] != '-' else 'A'}{serial[1:]}"
    refused = driver.quick("authority", "revoke", "--", serial, unknown, home=up)
    assert refused.code == errors.NotFound.exit_code
    assert unknown in refused.err
    assert serial not in refused.err
    assert ask("authority", "list")[0]["status"] == "valid"
    ask("authority", "revoke", serial)
    assert ask("authority", "list")[0]["status"] == "revoked"


def test_a_policy_is_checked_and_its_cost_shown(up):
    result = driver.quick("notify", "check", POLICY, "-o", "json", home=up)
    assert result.code == 0, result.err
    cost = result.json()
    assert (cost["clauses"], cost["cost"], cost["indexed"], cost["conjunctions"]) == (3, "lookup", True, 1)
    result = driver.quick("notify", "check", POLICY, home=up)
    assert "3 clauses, cost lookup, indexed as 1" in result.out


def test_explain_prints_side_clause_value_time_and_origin(up, listener):
    granted = driver.quick(
        *("authority", "grant", "admin", "_trust_level=1", "--audience", "admin/web"), home=up
    )
    assert granted.code == 0, granted.err
    result = driver.quick(
        *("notify", "explain", "alert threat_level=3", "admin/web", "--to", "load < 0.5"), home=up
    )
    assert result.code == 0, result.err
    for words in (
        "not delivered",
        "address: fails",
        "load is 0.9",
        "event: fails",
        "threat_level is 3",
        "sender: fails",
        "_trust_level = 1, granted by root (tier 1) from 20",
        "within audience ['admin/web']",
        "the receiver's state is unchanged since 20",
    ):
        assert words in result.out, result.out
    near = driver.quick("notify", "who", "load > 0.8", "--event", "alert", "threat_level=3", home=up)
    assert "matching receivers: 0" in near.out
    assert "near miss: admin/web" in near.out
    listed = driver.quick("authority", "list", home=up)
    assert "audience" in listed.out
    listener.terminate()
    listener.communicate(timeout=30)
    assert listener.returncode == 130
    assert driver.quick("notify", "receivers", "-o", "json", home=up).json() == []  # it has left
    # A durable receiver stays until it is removed.
    kept = ("--as", "kept", "--model", "WebServer", "--policy", "alert", "--durable", "--timeout", "0")
    assert driver.quick("notify", "listen", *kept, home=up).code == errors.TimedOut.exit_code
    left = driver.quick("notify", "leave", "admin/kept", home=up)
    assert left.code == 0, left.err
    assert driver.quick("notify", "receivers", "-o", "json", home=up).json() == []
    assert driver.quick("notify", "leave", "kept", home=up).code == errors.NotFound.exit_code


@pytest.mark.parametrize("form", ["yaml", "json", "notation", "xml"])
def test_models_are_written_in_every_form_and_read_back(up, tmp_path, form):
    result = driver.quick("notify", "models", "--form", form, home=up)
    assert result.code == 0, result.err
    file = tmp_path / "models"
    file.write_text(result.out)
    again = driver.quick("notify", "define", file, "-o", "json", home=up)
    assert again.code == 0, again.err
    assert {model["name"] for model in again.json()} == {"Controller", "WebServer", "alert"}
    file.write_text("policy bad = threat_levle > 2;")
    assert driver.quick("notify", "define", file, home=up).code == errors.ParseError.exit_code


def test_a_document_creates_receivers_and_senders(up, tmp_path):
    file = tmp_path / "farm.txt"
    file.write_text(
        "event command = { }\n"
        'state farm = WebServer { application = "IIS"; load = 0.5 }\n'
        "policy farm = command AND sender: (_trust_level >= 2);\n"
    )
    assert driver.quick("notify", "define", file, home=up).code == 0
    file.write_text("Controller = { String entity; int _trust_level = 3 }")
    wrong = driver.quick("notify", "define", file, home=up)
    assert wrong.code == errors.InvalidInput.exit_code
    assert "--as" in wrong.err
    granted = driver.quick("notify", "define", file, "--as", "boss", "-o", "json", home=up)
    assert granted.code == 0, granted.err
    assert {row["kind"] for row in granted.json()} == {
        "model of receivers",
        "receiver with Controller",
        "grant of _trust_level",
    }
    sent = driver.quick("notify", "send", "--as", "boss", "--event", "command", "--durable", home=up)
    assert sent.code == 0, sent.err
    heard = ("--as", "farm", "--model", "WebServer", "--durable", "--count", "1", "--timeout", "30")
    policy = ("--policy", "command AND sender: (_trust_level >= 2)", "-o", "json")
    assert driver.quick("notify", "listen", *heard, *policy, home=up).json()["type"] == "command"
    file.write_text("{ alert AND threat_level > 4 }")
    changed = driver.quick("notify", "define", file, "--as", "farm", home=up)
    assert changed.code == 0, changed.err
    listed = driver.quick("notify", "receivers", "-o", "json", home=up).json()
    assert [row["policy"] for row in listed if row["receiver"] == "admin/farm"] == [
        "alert = TRUE AND threat_level > 4"
    ]
    unknown = driver.quick("notify", "define", file, "--as", "nobody", home=up)
    assert unknown.code == errors.NotFound.exit_code
    for name in ("farm", "boss"):
        assert driver.quick("notify", "leave", name, home=up).code == 0


def test_mistakes_are_pointed_at(up):
    wrong = driver.quick("notify", "check", "threat_levle > 3", home=up)
    assert wrong.code == errors.ParseError.exit_code
    assert "did you mean threat_level?" in wrong.err
    wrong = driver.quick("notify", "send", "--event", "alert", "threat_level=high", home=up)
    assert wrong.code == errors.InvalidInput.exit_code
    assert "threat_level must be of type int" in wrong.err
    for words in (
        ("send", "--event", "alrt", "threat_level=4"),
        ("who", "TRUE", "--event", "alrt", "threat_level=4"),
        ("explain", "alrt threat_level=4", "admin/web"),
    ):
        wrong = driver.quick("notify", *words, home=up)
        assert wrong.code == errors.InvalidInput.exit_code
        assert "did you mean alert?" in wrong.err


def test_an_appointed_authority_stays_within_its_mandate(up, tmp_path):
    file = tmp_path / "nw.json"
    made = driver.quick(
        "authority",
        "appoint",
        "northwest",
        "--tier",
        "2",
        "--may",
        "_trust_level=1..3",
        "--to",
        file,
        "-o",
        "json",
        home=up,
    )
    assert made.code == 0, made.err
    good = driver.quick("authority", "grant", "bob", "_trust_level=3", "--tier", "2", "--by", file, home=up)
    assert good.code == 0, good.err
    bad = driver.quick("authority", "grant", "bob", "_trust_level=4", "--tier", "2", "--by", file, home=up)
    assert bad.code == errors.Forbidden.exit_code
    again = driver.quick(
        *("authority", "appoint", "idle", "--tier", "2", "--may", "_trust_level"),
        *("--to", tmp_path / "idle.json", "-o", "json"),
        home=up,
    )
    for serial, options in ((made.json()["serial"], ()), (again.json()["serial"], ("--unseen",))):
        revoked = driver.quick("authority", "revoke", serial, *options, home=up)
        assert revoked.code == 0, revoked.err
    listed = driver.quick("authority", "list", "-o", "json", home=up).json()
    assert [row["status"] for row in listed if row["holder"] == "bob"] == ["revoked"]
