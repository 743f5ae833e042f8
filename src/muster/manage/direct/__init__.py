"""Direct connections between agents and managers, without a broker."""
