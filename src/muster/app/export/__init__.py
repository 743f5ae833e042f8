"""Export of the activity log to other systems: syslog, and collectors of OpenTelemetry."""
