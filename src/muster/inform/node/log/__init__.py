"""The context log and the node's persistent view of it."""
