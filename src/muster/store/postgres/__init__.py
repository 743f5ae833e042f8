"""The store on PostgreSQL: `statements` is what it is told, `connections` how it is reached, `engine` when."""
