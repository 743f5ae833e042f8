"""Builds a domain from settings: starts, drains and stops its components.

Several domains can run in one process.
"""
