"""``/api/v1``: everything the dashboard shows and does, for programs. One file a part."""
