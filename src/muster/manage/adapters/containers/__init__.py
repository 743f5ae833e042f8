"""Containers of Podman or Docker: the adapter, and the client of their interface."""
