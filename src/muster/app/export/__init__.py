"""Export to systems of others: the activity log to syslog."""
