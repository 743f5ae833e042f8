"""HTML building blocks that the pages share."""
