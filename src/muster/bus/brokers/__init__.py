"""The domain's brokers: ``nats-server`` processes that Muster starts, supervises, links and stops.

- `config`: the configuration of a broker as data, and its text. Pure.
- `binary`: the server program, its version, and the features of each version.
- `diagnosis`: from the log of the server to an error that names the problem and the remedy. Pure.
- `topology`: existing and permitted links. Pure.
- `files`, `ports`: files of a broker and its reserved ports.
- `monitor`, `system_account`: requests to running brokers, over monitor ports and the system account.
- `broker`: one process. `network`: several brokers and their links. `storage`: their shared storage.

Guaranteed: a reported port is reserved; ready means that the health page of the broker reported it; a broker
ends with the process that started it. Brokers that other processes started are only queried, never changed.
"""
