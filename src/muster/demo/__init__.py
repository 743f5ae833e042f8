"""Scenario, simulated web servers, and the tour of ``muster demo``."""
