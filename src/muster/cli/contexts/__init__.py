"""Help section "Contexts": the information service."""
