"""Who someone is, what they may publish and receive, and who said so.

Identities (nkeys), credentials (JWTs that the broker enforces), certificates, authority grants and their
revocation.  Knows nothing of connections: it makes and checks documents, others present them.
"""
