"""Domains on several machines: joining, what each machine knows of the others, and their brokers' storage."""
