"""Jobs: when periodic ones run, and the history of what has ended."""
