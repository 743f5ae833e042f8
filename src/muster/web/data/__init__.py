"""The read model: one copy of bus data for all requests of the process."""
