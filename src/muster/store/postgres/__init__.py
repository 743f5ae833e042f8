"""The store on PostgreSQL: `statements` is what it hears, `connections` how it is reached, `engine` when."""
