"""The adapter of the guide, as a distribution of its own: found by its entry point, under the contract."""

from __future__ import annotations

import pathlib
import re
import sys
import tomllib

import pytest

from muster.core import errors
from muster.manage import manifest
from muster.manage.adapters import plugins
from tests.manage import contract

GUIDE = (pathlib.Path(__file__).parents[2] / "docs" / "guides" / "adapter.md").read_text()


def block(kind: str) -> str:
    found = re.search(rf"```{kind}\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(autouse=True)
def distribution(tmp_path, monkeypatch):
    """What `pip install` leaves of the guide's module and of its entry point."""
    (points,) = tomllib.loads(block("toml"))["project"]["entry-points"].items()
    group, ((name, place),) = points[0], tuple(points[1].items())
    module = place.partition(":")[0]
    file = tmp_path / "site" / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(parents=True)
    (file.parent / "__init__.py").touch()
    file.write_text(block("python").partition("# The calls an agent makes")[0])
    about = tmp_path / "site" / "my_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {place}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    plugins.load_adapter.cache_clear()
    yield
    plugins.load_adapter.cache_clear()
    for known in [known for known in sys.modules if known.partition(".")[0] == module.partition(".")[0]]:
        del sys.modules[known]


class TestForeignAdapter(contract.AdapterContract):
    type_name = "text-file"
    restarts_alone = True
    stops = False  # it has no `restart` and no `drain`

    @pytest.fixture
    def config(self, tmp_path):
        self.path = tmp_path / "motd"
        return {"path": str(self.path), "contents": "hello"}

    @pytest.fixture
    def other(self, config):
        return {**config, "contents": "goodbye"}

    async def break_it(self, host):
        self.path.unlink()
        return True


def test_manifests_are_checked_with_its_type():
    text = block("yaml")
    (entry,) = manifest.read(text, plugins.config_validators(), plugins.can_move)
    assert (entry.name, entry.type) == ("motd", "text-file")
    with pytest.raises(manifest.ManifestError, match="pathh") as wrong:
        manifest.read(text.replace("path:", "pathh:"), plugins.config_validators(), plugins.can_move)
    assert "line" in str(wrong.value)
    with pytest.raises(errors.NotFound, match="text-filee") as unknown:
        plugins.load_adapter("text-filee")
    assert "text-file" in str(unknown.value.hint)
