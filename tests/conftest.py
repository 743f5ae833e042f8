"""Every test runs under the house rules of `muster.testing.plugin` (``muster_strict`` in pyproject.toml)."""

import hypothesis

# Installed, Muster brings this plugin by its entry point of the same name, and pytest loads it once.
pytest_plugins = ["muster.testing.plugin", "pytester"]

# Random tests judge answers, not speed: a busy machine must not fail them.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")
