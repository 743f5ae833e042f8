"""System state at rest: one small interface over SQLite and PostgreSQL.

The only folder that imports a database driver.  `database.open` gives a `database.Store`; `api` holds its
words.  A transaction that returned is on disk; one that was refused left no trace.  Not here: caches,
secondary indexes, records that expire (their owners do that, in their own terms).
"""
