"""System state at rest: one small interface over SQLite and PostgreSQL.

The only folder that imports a database driver. `database.open` returns a `database.Store`; `api` has its
types. A transaction that returned is on disk; one that was rejected changed nothing. Not included: caches,
secondary indexes, expiry of records (services implement them as they need).
"""
