"""What administrators ask of a dispatcher: lists, purges, moves, and scheduled messages."""
