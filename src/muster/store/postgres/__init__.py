"""The store on PostgreSQL: `statements` has the SQL, `connections` the pool, `engine` the order of work."""
