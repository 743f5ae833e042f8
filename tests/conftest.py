"""Every test runs under the house rules of `muster.testing.plugin` (``muster_strict`` in pyproject.toml)."""

# Installed, Muster brings this plugin by its entry point of the same name, and pytest loads it once.
pytest_plugins = ["muster.testing.plugin", "pytester"]
