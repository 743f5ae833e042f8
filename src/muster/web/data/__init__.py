"""The read model: data of the bus, cached for all requests of the process."""
