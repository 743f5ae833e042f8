"""The sensor: host metrics, service reports, local intake."""
