"""Wiring and life cycle: builds a domain from settings, starts its parts, drains and stops them.

Embeddable: several domains can live in one process.
"""
