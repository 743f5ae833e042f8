from __future__ import annotations

import pathlib
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors
from muster.core.formats import toml
from muster.core.settings import bus, domain, loader, sections


class Engine(sections.SettingsSection, frozen=True, kw_only=True):
    """What drives it."""

    warm_up_s: Annotated[float, sections.field_doc("Longer is smoother, and later.", ge=0)] = 2.5
    tank_bytes: Annotated[int, sections.field_doc("More lasts longer.", ge=1)] = 1024
    cylinders: Annotated[int, sections.field_doc("More is louder.", ge=1, le=12)] = 4
    choke: Annotated[bool, sections.field_doc("Cold starts.")] = False
    fuel: Annotated[Literal["petrol", "steam"], sections.field_doc("What burns.")] = "steam"
    places: Annotated[tuple[str, ...], sections.field_doc("Where it stands.")] = ()
    note: Annotated[str, sections.field_doc("Any text.")] = ""
    token: Annotated[sections.Secret, sections.field_doc("A key.")] = ""
    folder: Annotated[sections.FilePath, sections.field_doc("A path.")] = ""

    def __post_init__(self) -> None:
        if self.choke and self.fuel == "steam":
            raise errors.InvalidInput("steam has no choke")


class Car(sections.SettingsSection, frozen=True, kw_only=True):
    engine: Engine = msgspec.field(default_factory=Engine)


def write(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "muster.toml"
    path.write_text(text)
    return path


def faults(**places: object) -> tuple[loader.SettingsProblem, ...]:
    with pytest.raises(loader.InvalidSettings) as caught:
        loader.load(Car, **places)  # type: ignore[arg-type]
    return caught.value.problems


def test_later_places_win_and_each_value_remembers_its_place(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, '[engine]\nwarm_up_s = "1m"\ncylinders = 6\nnote = "file"\n')
    actual = loader.resolve(
        Car,
        file=path,
        env={
            "MUSTER_ENGINE__CYLINDERS": "8",
            "MUSTER_ENGINE__NOTE": "env",
            "OTHER__X": "y",
            "MUSTER_PROFILE": "p",
        },
        flags={"engine.note": "flag"},
    )
    assert actual.settings.engine == Engine(warm_up_s=60.0, cylinders=8, note="flag")
    assert actual.sources == {
        "engine.warm_up_s": f"{path}:2",
        "engine.cylinders": "environment MUSTER_ENGINE__CYLINDERS",
        "engine.note": "--set engine.note",
    }


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("warm_up_s", "1m30s", 90.0),
        ("warm_up_s", "3", 3.0),
        ("tank_bytes", "64MiB", 64 << 20),
        ("cylinders", "12", 12),
        ("choke", "no", False),
        ("fuel", "petrol", "petrol"),
        ("places", "a, b,,c ", ("a", "b", "c")),
        ("token", "file:/run/key", "file:/run/key"),
        ("note", "15s", "15s"),
    ],
)
def test_text_becomes_the_fields_type(key: str, text: str, value: object) -> None:
    loaded = loader.load(Car, env={f"MUSTER_ENGINE__{key.upper()}": text})
    assert getattr(loaded.engine, key) == value


def test_a_number_may_stand_for_a_duration_or_size_in_a_file(tmp_path: pathlib.Path) -> None:
    loaded = loader.load(Car, file=write(tmp_path, "[engine]\nwarm_up_s = 3\ntank_bytes = 77\n"))
    assert (loaded.engine.warm_up_s, loaded.engine.tank_bytes) == (3.0, 77)


def test_all_errors_are_reported_at_once_with_place_and_remedy(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, "# a car\n[engine]\ncylinder = 3\n\n[engin]\nx = 1\n")
    problems = faults(
        file=path,
        env={"MUSTER_ENGINE__CHOKE": "maybe", "MUSTER_ENGINE_FUEL": "petrol"},
        flags={"engine": "x", "engine.cylinders": "13", "engine.warm_up_s": "soon"},
    )
    reported = [str(problem) for problem in problems]
    assert reported[0] == f"{path}:3: engine.cylinder: unknown setting; did you mean engine.cylinders?"
    assert reported[1] == f"{path}:5: engin: unknown setting; did you mean engine?"
    assert (
        reported[2] == "environment MUSTER_ENGINE_FUEL: did you mean MUSTER_ENGINE__FUEL (two underscores)?"
    )
    assert "environment MUSTER_ENGINE__CHOKE: engine.choke: Expected bool" in reported[3]
    assert "engine: is a section" in reported[4]
    assert "at least 1 and at most 12" in reported[5]
    assert "'soon' is not a duration" in reported[6]


def test_sections_of_others_are_skipped_where_only_some_are_needed(tmp_path: pathlib.Path) -> None:
    file = write(tmp_path, "[engine]\ncylinders = 6\n[wheels]\ncount = 4\n")
    env = {"MUSTER_WHEELS__COUNT": "5"}
    assert loader.load(Car, file=file, env=env, whole=False).engine.cylinders == 6
    with pytest.raises(loader.InvalidSettings, match="wheels"):
        loader.load(Car, file=file)
    misspelt = write(tmp_path, "[engine]\ncylnders = 6\n")
    with pytest.raises(loader.InvalidSettings, match="cylinders"):
        loader.load(Car, file=misspelt, whole=False)


def test_a_file_full_of_faults_is_refused_soon(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, "\n".join(f"key{number} = 1" for number in range(50_000)))
    assert len(faults(file=path)) == loader.MAX_PROBLEMS


def test_the_right_name_in_the_wrong_section_is_found() -> None:
    [problem] = faults(flags={"propulsion.unit.cylinders": "3"})
    assert "did you mean engine.cylinders?" in problem.what


def test_a_check_of_several_fields_names_the_places_that_set_them() -> None:
    [problem] = faults(flags={"engine.choke": "true"})
    assert str(problem) == "--set engine.choke: engine: steam has no choke"


def test_a_literal_secret_is_refused_and_never_repeated() -> None:
    [problem] = faults(flags={"engine.token": "hunter2"})
    assert "hunter2" not in str(problem)
    assert "file:PATH or env:NAME" in problem.what


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "99999999999999999999"])
def test_numbers_that_are_none_are_refused(tmp_path: pathlib.Path, value: str) -> None:
    for key in ("warm_up_s", "tank_bytes", "cylinders"):
        assert faults(file=write(tmp_path, f"[engine]\n{key} = {value}\n"))


def test_relative_paths_in_a_file_start_from_its_folder(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, '[engine]\nfolder = "data"\n')
    assert loader.load(Car, file=path).engine.folder == str(tmp_path / "data")
    assert loader.load(Car, file=path, flags={"engine.folder": "data"}).engine.folder == "data"
    assert loader.load(Car, file=write(tmp_path, '[engine]\nfolder = "/srv"\n')).engine.folder == "/srv"


def test_files_that_cannot_be_read_say_so(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.NotFound, match="no file"):
        loader.load(Car, file=tmp_path / "none.toml")
    with pytest.raises(errors.InvalidInput, match="cannot read"):
        loader.load(Car, file=tmp_path)
    with pytest.raises(errors.InvalidInput, match=r"not TOML.*line 2"):
        loader.load(Car, file=write(tmp_path, "[engine]\nnote = \n"))
    with pytest.raises(errors.InvalidInput, match="not TOML"):
        loader.load(Car, file=write(tmp_path, "a = " + "[" * 100_000))
    (tmp_path / "latin.toml").write_bytes(b"[engine]\nnote = '\xe9'\n")
    with pytest.raises(errors.InvalidInput, match="not UTF-8 text"):
        loader.load(Car, file=tmp_path / "latin.toml")
    with pytest.raises(errors.InvalidInput, match="not TOML"):
        loader.load(Car, file=write(tmp_path, "a = " + "9" * 5000))
    with pytest.raises(errors.LimitExceeded):
        loader.load(Car, file=write(tmp_path, "#" * (toml.MAX_BYTES + 1)))


def test_secrets_are_read_from_where_they_are_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    assert loader.read_secret("file:key", {}, folder=tmp_path) == "s3cret"
    assert loader.read_secret("env:KEY", {"KEY": "k"}) == "k"
    with pytest.raises(errors.NotFound, match="KEY"):
        loader.read_secret("env:KEY", {})
    with pytest.raises(errors.NotFound, match="No such file"):
        loader.read_secret("file:none", {}, folder=tmp_path)
    with pytest.raises(errors.InvalidInput) as caught:
        loader.read_secret("hunter2", {})
    assert "hunter2" not in caught.value.message


@given(st.text(max_size=200))
def test_any_text_is_settings_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        loader.load(domain.BaseSettings, file=path)
    except errors.InvalidInput as error:
        assert str(path) in str(error)  # noqa: PT017 - either outcome is right


@given(
    st.dictionaries(
        st.one_of(
            st.text(max_size=20),
            st.sampled_from([field.key for field in sections.fields(domain.BaseSettings)]),
        ),
        st.one_of(
            st.text(max_size=20),
            st.integers(),
            st.floats(),
            st.booleans(),
            st.none(),
            st.lists(st.integers()),
        ),
        max_size=5,
    )
)
def test_any_flags_are_settings_or_a_clear_error(flags: dict[str, object]) -> None:
    try:
        loaded = loader.load(domain.BaseSettings, flags=flags)
        assert msgspec.convert(msgspec.to_builtins(loaded), domain.BaseSettings) == loaded
    except loader.InvalidSettings as error:
        assert error.problems  # noqa: PT017 - either outcome is right


@given(
    st.builds(
        Engine,
        warm_up_s=st.floats(0, 1e9),
        tank_bytes=st.integers(1, loader.MAX_NUMBER),
        fuel=st.just("petrol"),
        choke=st.booleans(),
        places=st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=3).map(tuple),
        note=st.text(st.characters(codec="utf-8")),
    )
)
def test_printed_settings_read_back(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> None:
    path = tmp_path_factory.getbasetemp() / "printed.toml"
    path.write_bytes(loader.to_toml(Car(engine=engine), {"engine.note": "somewhere"}).encode())
    assert loader.load(Car, file=path).engine == engine


def test_printed_settings_hide_passwords_and_show_sources() -> None:
    car = Car(engine=Engine(note="see postgresql://me:pa:ss@host/db and nats://tok@h"))
    printed = loader.to_toml(car, {"engine.note": "flag engine.note"})
    assert 'note = "see postgresql://me:***@host/db and nats://tok@h"  # flag engine.note' in printed
    assert "cylinders = 4  # default" in printed


# -- the ground -------------------------------------------------------------------------------------------


def test_tls_is_off_on_loopback_only() -> None:
    assert not bus.BusSettings(host="127.0.0.1").uses_tls
    assert not bus.BusSettings(host="::1").uses_tls
    assert not bus.BusSettings(host="localhost").uses_tls
    assert bus.BusSettings(host="0.0.0.0").uses_tls
    assert bus.BusSettings(host="127.0.0.1.example.org").uses_tls
    assert bus.BusSettings(host="127.0.0.1", tls="on").uses_tls
    assert not bus.BusSettings(host="0.0.0.0", tls="off").uses_tls


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"domain.name": "a.b"}, "cannot be a name"),
        ({"domain.name": "../.."}, "cannot be a name"),
        ({"bus.servers": "nats://u:p@h:1"}, "must not hold a password"),
        ({"bus.servers": "nats://[::1"}, "not a URL"),
        ({"bus.storage_brokers": "2"}, "but brokers only 1"),
        ({"bus.leaves": "2"}, "leaf-tree"),
        ({"bus.clusters": "2"}, "super-cluster"),
        ({"bus.storage_disk_bytes": "1GiB"}, "sum up to"),
        ({"health.port": "65536"}, "at most 65535"),
    ],
)
def test_what_cannot_work_is_refused(flags: dict[str, str], fault: str) -> None:
    with pytest.raises(loader.InvalidSettings, match=fault) as caught:
        loader.load(domain.BaseSettings, flags=flags)
    assert "hunter2" not in str(caught.value)


def test_someone_elses_brokers_have_budgets_of_their_own() -> None:
    flags = {"bus.storage_disk_bytes": "1GiB", "bus.servers": "nats://a:4222,nats://b:4222"}
    assert loader.load(domain.BaseSettings, flags=flags).bus.servers == ("nats://a:4222", "nats://b:4222")


def test_a_service_adds_its_section_by_subclassing() -> None:
    class Whole(domain.BaseSettings, frozen=True, kw_only=True):
        engine: Engine = msgspec.field(default_factory=Engine)

    loaded = loader.load(Whole, flags={"engine.cylinders": 2, "bus.port": 4222})
    assert (loaded.engine.cylinders, loaded.bus.port) == (2, 4222)


class Ports(sections.SettingsSection, frozen=True, kw_only=True):
    open: Annotated[tuple[int, ...], sections.field_doc("Where it listens.")] = ()


class Listening(sections.SettingsSection, frozen=True, kw_only=True):
    ports: Ports = Ports()


def test_a_list_of_numbers_can_be_set_by_the_environment():
    assert loader.load(Listening, env={"MUSTER_PORTS__OPEN": "5000, 5001"}).ports.open == (5000, 5001)
    with pytest.raises(loader.InvalidSettings, match="a list of integers"):
        loader.load(Listening, env={"MUSTER_PORTS__OPEN": "5000,x"})


def test_a_list_can_be_set_in_the_form_of_the_file():
    flags = {"bus.servers": '["nats://a:4222", "nats://b:4222"]'}
    assert loader.load(domain.BaseSettings, flags=flags).bus.servers == ("nats://a:4222", "nats://b:4222")
    assert loader.load(Listening, env={"MUSTER_PORTS__OPEN": " [5000, 5001] "}).ports.open == (5000, 5001)
    for wrong in ("[a, b]", "[5000", "[]\nx = 1", '["5000"]'):
        with pytest.raises(loader.InvalidSettings, match="list"):
            loader.load(Listening, flags={"ports.open": wrong})
