"""Roles, rights on queues, and the permission matrix."""
