"""Help section "Tool": profiles, completion, version."""
