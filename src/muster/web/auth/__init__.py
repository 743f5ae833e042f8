"""Passwords, sessions, tokens."""
