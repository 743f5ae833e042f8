"""Reconciles the resources assigned to one manager."""
