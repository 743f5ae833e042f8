"""History tables: write, compact, search."""
