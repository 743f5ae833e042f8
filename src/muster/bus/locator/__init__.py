"""Finds the best broker for a client."""
