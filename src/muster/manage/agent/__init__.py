"""Runs adapters on one machine and refuses commands of an older epoch."""
