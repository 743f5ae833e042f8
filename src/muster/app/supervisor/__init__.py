"""Child processes: start, restart with back-off, orphan detection, readiness."""
