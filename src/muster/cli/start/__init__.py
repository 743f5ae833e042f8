"""Help section "Getting started": first contact with Muster."""
