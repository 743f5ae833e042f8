"""``/api/v1``: the REST API. One module per topic."""
