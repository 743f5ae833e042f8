"""Help section "This command": profiles, completion, version."""
