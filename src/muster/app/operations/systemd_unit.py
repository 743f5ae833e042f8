"""The systemd unit of a domain: it restarts the main process after a crash, a freeze and a reboot.

The main process supervises all others of the domain, and systemd supervises it. ``Type=notify``: the unit is
active when the domain serves. ``WatchdogSec``: the process reports regularly that its event loop runs
(`muster.app.service_manager`); one that does not is killed and restarted.
"""

from __future__ import annotations

from pathlib import Path

WATCHDOG_S = 3  # the process reports five times in it

_HEAD = """\
# A domain: brokers, services. `muster systemd` prints this unit for an installation.
#   install -m 644 muster.service /etc/systemd/system/ && systemctl enable --now muster
# Create the home first: sudo -u muster muster init --home {home}
[Unit]
Description=Muster domain
Documentation=file:/usr/share/doc/muster/deploy.md
After=network-online.target time-sync.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
"""

_ACCOUNT = """\
User={user}
Group={user}
StateDirectory={state}
StateDirectoryMode=0700
"""

_BODY = """\
WorkingDirectory={home}
Environment=MUSTER_HOME={home} MUSTER_LOG__FORMAT=json
EnvironmentFile=-/etc/muster/environment
ExecStart={program} up
# SIGTERM drains and stops in order; brokers and children end with it. After a crash, the next process adopts
# the brokers, which run for up to 30 s without it, and the resources of this machine; all other children end.
KillMode=process
TimeoutStartSec=180
TimeoutStopSec=90
# After a crash, and when the process does not report that it works; not after `muster down`.
Restart=on-failure
RestartSec=500ms
WatchdogSec={watchdog_s}
WatchdogSignal=SIGKILL
LimitNOFILE=131072
UMask=0077
"""

_CONFINED = """\

NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RemoveIPC=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
# Not MemoryDenyWriteExecute: Spark's Java and numba make code at run time.
"""

_STATE = Path("/var/lib")


def unit(*, program: Path, home: Path, user: str = "") -> str:
    """The unit of the domain in ``home``. With ``user`` a unit of the system that runs as this user, confined
    to its home; without, a unit for the service manager of the user who calls it."""
    text = _HEAD + (_ACCOUNT if user and home.parent == _STATE else "User={user}\n" if user else "") + _BODY
    if user:
        text += _CONFINED if home.parent == _STATE else _CONFINED.replace("ProtectHome=yes\n", "")
        if home.parent != _STATE:
            text += "ReadWritePaths={home}\n"
    text += "\n[Install]\nWantedBy={target}\n"
    return text.format(
        program=_escape(program),
        home=_escape(home),
        user=user,
        state=home.name,
        watchdog_s=WATCHDOG_S,
        target="multi-user.target" if user else "default.target",
    )


def _escape(path: Path) -> str:
    """A path in a unit: ``%`` begins a specifier, and a space ends a word."""
    return str(path).replace("%", "%%").replace(" ", "\\x20")
