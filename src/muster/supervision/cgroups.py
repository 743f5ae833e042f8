"""Control groups (version 2): limits that hold for all processes of a run together.

A group is made beside that of this process, or below the root if this process is in it. The kernel gives
controllers to the groups below only where no process is, so the group above has to be delegated: a unit of
systemd needs ``Delegate=yes`` and ``DelegateSubgroup=agent``. Where it is not, or a controller is missing,
nothing is made, and the error says what is missing. All functions block.
"""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Mapping

from muster.core import errors

DELEGATION = "a unit of systemd needs Delegate=yes and DelegateSubgroup=agent"
REMOVE_S, POLL_S = 2.0, 0.01
_TYPE = "cgroup2"
_OWN = "0::"


def create(name: str, limits: Mapping[str, str]) -> pathlib.Path:
    """Make a group with these values of its files, such as ``{"memory.max": "1048576"}``; `errors.Refused`
    if this machine does not permit it."""
    parent = _parent()
    controllers = sorted({file.partition(".")[0] for file in limits})
    try:
        available = (parent / "cgroup.controllers").read_text().split()
        missing = [controller for controller in controllers if controller not in available]
        if missing:
            raise errors.Refused(
                f"cgroup v2 has no controller {', '.join(missing)} in {parent}; "
                f"available: {', '.join(available) or 'none'}",
                hint=DELEGATION,
            )
        enabled = (parent / "cgroup.subtree_control").read_text().split()
        for controller in controllers:
            if controller not in enabled:
                (parent / "cgroup.subtree_control").write_text(f"+{controller}")
        group = parent / name
        group.mkdir(exist_ok=True)
        for file, value in limits.items():
            (group / file).write_text(value)
    except OSError as error:
        remove(name)
        raise errors.Refused(
            f"cannot limit by a control group of {parent}: {error.strerror or error}", hint=DELEGATION
        ) from error
    return group


def remove(name: str) -> None:
    """Kill what is left in a group, and remove it."""
    with contextlib.suppress(OSError, errors.Refused):
        group = _parent() / name
        (group / "cgroup.kill").write_text("1")
        until_s = time.monotonic() + REMOVE_S
        while (group / "cgroup.procs").read_text() and time.monotonic() < until_s:
            time.sleep(POLL_S)
        group.rmdir()


def path(name: str) -> pathlib.Path:
    return _parent() / name


def _parent() -> pathlib.Path:
    mount = None
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, source = line.partition(" - ")
        if source.startswith(f"{_TYPE} "):
            mount = pathlib.Path(fields.split()[4])  # a later one may cover an earlier one
    if mount is None:
        raise errors.Refused("this machine has no control groups of version 2")
    own = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line.removeprefix(_OWN) for line in own if line.startswith(_OWN)), "/")
    return (mount / path.lstrip("/")).parent if path != "/" else mount
