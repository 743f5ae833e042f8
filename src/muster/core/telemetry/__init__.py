"""Log events, metrics, traces."""
