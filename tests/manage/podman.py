"""A Podman of its own, in a temporary folder, with an image that contains only busybox.

One without privileges belongs to the user of the tests, or to another user if that is root. It maps a single
user, because not every machine has ranges of users for it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator

IMAGE = "localhost/box:latest"
SETTINGS = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
exit_command_delay = 1
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
"""
OTHER_USER = 65534


@contextlib.contextmanager
def podman(*, privileged: bool = True) -> Iterator[str]:
    """The path of its socket. The limits and the runtime are what a machine without systemd permits."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="podman-"))  # Podman refuses long paths
    (folder / "image").mkdir(parents=True)
    (folder / "containers.conf").write_text(SETTINGS)
    shutil.copy(shutil.which("busybox") or "", folder / "image" / "busybox")
    names = ("busybox", "sh", "sleep", "tty", "stty", "kill", "cat")
    lines = ["FROM scratch", *(f"COPY busybox /bin/{name}" for name in names)]
    (folder / "image" / "Dockerfile").write_text("\n".join(lines))
    environment = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
    command: list[str] = []
    if not privileged:
        environment |= {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}
        if os.geteuid() == 0:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, OTHER_USER, OTHER_USER)
            command = ["setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
    command += ["podman", "--root", str(folder / "store"), "--runroot", str(folder / "run")]
    command += ["--storage-driver", "vfs", "--log-level", "error"]
    isolation = [] if privileged else ["--isolation", "chroot"]
    build = [*command, "build", *isolation, "--tag", IMAGE, str(folder / "image")]
    subprocess.run(build, env=environment, check=True, capture_output=True)
    socket = folder / "podman.sock"
    serve = [*command, "system", "service", "--time=0", f"unix://{socket}"]
    with subprocess.Popen(serve, env=environment, stderr=subprocess.DEVNULL) as service:
        try:
            deadline = time.monotonic() + 30
            while not socket.exists() and time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    service.wait(0.05)
            yield str(socket)
        finally:
            remove = [*command, "rm", "--all", "--force", "--time=0"]
            subprocess.run(remove, env=environment, check=False, capture_output=True)
            service.terminate()
    shutil.rmtree(folder, ignore_errors=True)
