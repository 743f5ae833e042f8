"""System state at rest: a small interface over SQLite and PostgreSQL.

The only folder that imports a database driver.  A transaction that returned is on disk.
"""
