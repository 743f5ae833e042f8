"""All settings of a domain, as `muster.app.settings` combines them from its packages."""

from __future__ import annotations

import re
from pathlib import Path

from muster.app import settings as app_settings
from muster.app.components import factories, monitor
from muster.core.settings import loader, sections
from tools.reference import settings as settings_page

ROOT = Path(__file__).parents[2]
FIELDS = sections.fields(app_settings.Settings)


def test_every_setting_explains_itself():
    assert [field.key for field in FIELDS if len(field.description) < 10] == []


def test_the_reference_page_has_every_setting():
    page = settings_page.render_page()
    assert [field.key for field in FIELDS if f"`{field.env}`  \n  {field.description}\n" not in page] == []


def test_every_setting_is_read():
    """A setting that nothing reads promises what does not happen."""
    read = {
        name
        for path in (ROOT / "src" / "muster").rglob("*.py")
        for name in re.findall(r"\.(\w+)\b(?! *=[^=])", path.read_text())
    }
    assert [field.key for field in FIELDS if not read.issuperset(field.path[1:])] == []


def test_machines_of_one_domain_have_sensors_and_channels_of_different_names(tmp_path):
    """Reports of two machines with one name would be those of one machine."""
    names = []
    for more in ({}, {"manage.agent_name": "b"}, {"manage.agent_name": "b", "sensor.name": "host-b"}):
        flags = {"domain.data_dir": str(tmp_path), "sensor.enabled": "true", "channel.enabled": "true"}
        made = factories.components(loader.load(app_settings.Settings, flags={**flags, **more}))
        kinds = (monitor.SensorComponent, monitor.ChannelComponent)
        names.append({part.identity for part in made if isinstance(part, kinds)})
    assert names == [{"sensor", "channel"}, {"sensor-b", "channel-b"}, {"host-b", "channel-b"}]
