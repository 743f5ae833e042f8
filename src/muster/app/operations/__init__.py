"""Operator functions over a whole domain: audit, backup, doctor, retention, capacity."""
