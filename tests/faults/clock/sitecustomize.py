"""Move the wall clock of this process: only processes that the harness starts with this folder import it."""

import os
import time

_BY_S = float(os.environ.get("MUSTER_FAULTS_CLOCK_S", "0"))
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _BY_S
time.time_ns = lambda: _time_ns() + int(_BY_S * 1e9)
