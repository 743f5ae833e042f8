"""Identities, their permissions, and the signed documents that prove them.

Identities (nkeys), credentials (JWTs that the broker enforces), certificates, grants and their revocation. No
connections: this package creates and checks documents, and other code presents them.
"""
