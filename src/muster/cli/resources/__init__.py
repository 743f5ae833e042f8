"""Help section "Resources": desired state, live state, agents."""
