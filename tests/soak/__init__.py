"""An hour of steady load with a fault every minute: does anything leak, and is anything lost? (`make soak`)

- `domain`: the domain and the processes beside it, started as a user would.
- `workloads`: clients that use every service, and enter what was acknowledged in ledgers.
- `ledgers`: what was acknowledged against what arrived. Pure.
- `faults`: kills and freezes one process after the other.
- `sizes`: memory, descriptors, threads, tasks and stored bytes of every process, every ten seconds.
- `trends`: slopes by robust regression, and whether a size is level. Pure.
- `result`: the verdict as text, JSON and a plot, and its tables in the documentation.
"""
