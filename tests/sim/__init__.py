"""A simulator of the whole domain: real services, simulated network, disks and clocks, one seed.

- `loop`: the event loop, in which processes can be frozen and killed; `entropy`: time and randomness.
- `host`: machines with a disk and a clock; `domain`: the services on them.
- `workloads`: what clients do; `nemesis`: faults; both draw from the seed.
- `history`: what happened; `checkers`: judge it, and know neither workload nor nemesis.
- `run`: one seed from start to verdict; ``python -m tests.sim`` (``make sim``) replays and searches.
- `bugs`: patches that break Muster; the simulator has to find each.
"""
