"""The brokers themselves: real ``nats-server`` processes, started, supervised, linked and stopped by us.

- `config`: what a broker is told, as data, and the text the server reads. Pure.
- `binary`: which server program is run, its version, and what each version can do.
- `faults`: from the server's log to an error that names the fault and the cure. Pure.
- `supervision`: whether and when to start a crashed broker again. Pure.
- `topology`: which links there are, and which may be made. `ranking`: which broker is best for whom. Pure.
- `files`, `ports`: what a broker has on disk, and the ports that are held for it.
- `monitor`, `system`: questions to running brokers, over their monitor ports and their system account.
- `broker`: one process. `network`: several, and the links between them. `storage`: what they share.

Promised: a port that is reported is really held; ready means the broker said so; a broker dies with the
process that started it.  Not promised: brokers that others started are never touched, only asked.
"""
