"""Passwords of people and clients: stores, checks, throttling."""
