"""Report types: columns, sketches."""
