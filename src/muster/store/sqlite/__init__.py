"""The store on SQLite: `statements` is what a thread does with a connection, `engine` who does it when."""
