"""``muster creds issue`` without a running domain."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path

import pytest

from muster.app import home as app_home
from muster.app import identities
from muster.app.components import dispatcher, notifier
from muster.app.operations import audit
from muster.core import errors
from muster.gateways.uddi import registry
from muster.loop import responder
from muster.monitor import settings
from muster.pipeline import settings as pipeline_settings
from muster.trust import keyring
from muster.trust.permissions import own_names, roles
from tests.cli import driver


@pytest.fixture
def home(muster: driver.InProcess, tmp_path: Path) -> Path:
    assert muster("init", "--home", tmp_path / "home").code == 0
    return tmp_path / "home"


def test_a_permission_that_subjects_cannot_express_is_refused(muster, home):
    answer = muster("creds", "issue", "meter", "--topic", "Region=north,Kind=meter", "--home", home)
    assert answer.code == 2
    assert "cannot be a permission" in answer.err
    assert "semicolons" in answer.err
    assert muster("creds", "show", "meter", "--home", home).code == 4  # nothing was issued
    for name, topic in (("both", "Kind=meter;Region=north"), ("one", "Region=north")):
        assert muster("creds", "issue", name, "--topic", topic, "--home", home).code == 0


def test_credentials_written_over_a_readable_file_are_private(muster, home, tmp_path):
    to = tmp_path / "ann.creds"
    to.write_text("old")
    to.chmod(0o644)
    assert muster("creds", "issue", "ann", "--to", to, "--home", home).code == 0
    assert "NKEY" in to.read_text()
    assert stat.S_IMODE(to.stat().st_mode) == 0o600


def test_a_revocation_that_no_broker_confirms_is_stored_and_fails(muster, home):
    assert muster("creds", "issue", "ann", "--home", home).code == 0
    folder = app_home.DomainFolder(home / "local")
    with folder.hold():
        running = app_home.RunningDomain(
            domain="local", pid=1, started_at_s=0.0, version="", servers=("nats://127.0.0.1:9",)
        )
        folder.announce(running)
        answer = muster("creds", "revoke", "ann", "--home", home)
    assert answer.code == errors.Unavailable.exit_code
    assert "1 of 1 brokers did not confirm" in answer.err
    assert "nats://127.0.0.1:9" in answer.err
    assert "repeat the command" in answer.err
    assert '"revoked"' in muster("creds", "show", "ann", "-o", "json", "--home", home).out
    notes = [note.read_text() for note in (folder.root / audit.FOLDER).glob("*.json")]
    assert ["in-doubt" in note for note in notes if '"revoke"' in note] == [True]


def test_a_password_of_the_gateways_gives_no_more_than_the_identity_has(
    muster: driver.InProcess, home: Path, monkeypatch: pytest.MonkeyPatch
):
    def login(name: str, *options: str) -> driver.Answer:
        monkeypatch.setattr("sys.stdin", io.StringIO("a long secret\n"))
        return muster("gateway", "password", name, *options, "--home", home, "-o", "json")

    assert muster("creds", "issue", "vic", "--role", "viewer", "--home", home).code == 0
    assert json.loads(login("vic").out)["role"] == "viewer"
    wider = login("vic", "--role", "user")
    assert wider.code == errors.Conflict.exit_code
    assert "cannot have the wider role user" in wider.err
    assert muster("creds", "issue", "host", "--role", "agent", "--home", home).code == 0
    assert json.loads(login("host").out)["role"] == "agent"
    assert login("host", "--role", "user").code == errors.Conflict.exit_code
    assert json.loads(login("new").out)["role"] == "user"
    assert json.loads(login("new", "--role", "viewer").out)["role"] == "viewer"
    assert json.loads(login("new").out)["role"] == "viewer", "a new password changes no role"
    assert muster("creds", "revoke", "vic", "--home", home).code == 0
    assert "revoked" in login("vic").err
    listed = json.loads(muster("creds", "list", "-o", "json", "--home", home).out)
    assert {"vic-user", "host-user", "new-viewer"}.isdisjoint(row["identity"] for row in listed)


def test_an_interrupted_act_on_the_home_is_recorded_in_doubt(muster, home, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(keyring.Keyring, "revoke", interrupt)
    assert muster("creds", "revoke", "ann", "--home", home).code != 0
    notes = [note.read_text() for note in (home / "local" / audit.FOLDER).glob("*.json")]
    assert ["in-doubt" in note for note in notes if '"revoke"' in note] == [True]


def test_rights_on_queues_are_issued_and_shown(muster, home):
    arguments = ("--queue", "orders:send", "--queue", "receipts-*:receive,browse")
    assert muster("creds", "issue", "shop", *arguments, "--home", home).code == 0
    assert muster("creds", "issue", "meter", "--topic", "meters/>", "--home", home).code == 0
    shown = {
        name: json.loads(muster("creds", "show", name, "-o", "json", "--home", home).out)["queues"]
        for name in ("shop", "meter", "admin")
    }
    assert shown["shop"] == ["orders:send", "receipts-*:receive,browse"]
    assert shown["meter"] == []
    assert "*:send,receive,browse,admin" in shown["admin"]
    assert "receipts-*:receive,browse" in muster("creds", "list", "--home", home).out
    wrong = muster("creds", "issue", "other", "--queue", "orders:write", "--home", home)
    assert wrong.code == 2
    assert "send, receive, browse, admin" in wrong.err


def test_what_the_doctor_recommends_for_credentials_that_end_works(muster, home, tmp_path):
    to = tmp_path / "ann.creds"
    assert muster("creds", "issue", "ann", "--lifetime", "1d", "--to", to, "--home", home).code == 0
    before = to.read_text()
    ending = {finding["check"]: finding for finding in muster("doctor", "-o", "json", "--home", home).json()}[
        "keys"
    ]
    assert "ann" in ending["finding"]
    assert "muster creds renew NAME" in ending["advice"]
    assert muster("creds", "renew", "ann", "--lifetime", "90d", "--to", to, "--home", home).code == 0
    renewed = to.read_text()
    assert renewed != before
    assert renewed[renewed.index("SEED") :] == before[before.index("SEED") :]  # the same key
    after = {finding["check"]: finding for finding in muster("doctor", "-o", "json", "--home", home).json()}[
        "keys"
    ]
    assert "ann" not in after["finding"]
    assert muster("creds", "revoke", "ann", "--home", home).code == 0
    assert muster("creds", "renew", "ann", "--home", home).code == 3


def test_the_names_of_the_domains_own_parts_are_refused(muster, home):
    for name, role in (("sensor", "agent"), ("web", "agent"), ("channel", "user")):
        answer = muster("creds", "issue", name, "--role", role, "--home", home)
        assert answer.code == errors.Conflict.exit_code
        assert f"'{name}' is the name of a part of the domain itself" in answer.err
    assert muster("creds", "issue", "pipeline", "--role", "pipeline", "--home", home).code == 0
    trust = keyring.Keyring.open(home / "local" / "keys")
    trust.issue(own_names.SENSOR, roles.Role.AGENT)
    trust.revoke(own_names.SENSOR)
    assert muster("creds", "issue", "sensor", "--role", "agent", "--home", home).code == 0, "readmitted"


def test_a_sensor_has_no_name_of_another_part_of_the_domain(muster, home):
    answer = muster("run", "sensor", "--name", "channel", "--home", home)
    assert answer.code == errors.Conflict.exit_code
    assert "'channel' is the name of a part of the domain itself" in answer.err


def test_names_of_parts_are_those_that_they_connect_with():
    parts = {
        identities.SELF: roles.Role.BOOTSTRAP,
        identities.LINK: roles.Role.LINK,
        settings.ChannelSettings().name: roles.Role.CHANNEL,
        settings.SensorSettings().name: roles.Role.AGENT,
        pipeline_settings.PipelineSettings().name: roles.Role.PIPELINE,
        dispatcher.IDENTITY: roles.Role.GATEWAY,
        notifier.IDENTITY: roles.Role.NOTIFIER,
        responder.IDENTITY: roles.Role.RESPONDER,
        registry.READER.name: roles.Role.VIEWER,
        "web": roles.Role.WEB,
    }
    assert parts == own_names.ROLES
