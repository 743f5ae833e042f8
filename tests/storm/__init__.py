"""A whole fleet reconnects after a broker restart (`make storm`).

- `domain`: the domain, the kill, and what is measured.
- `fleet_process`: the processes with the connections of the fleet.
"""
