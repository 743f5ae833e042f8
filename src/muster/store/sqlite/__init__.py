"""The store on SQLite: `statements` has the functions on a connection, `engine` the threads that run them."""
