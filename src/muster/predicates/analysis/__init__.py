"""Type check, normal forms, cost, explanation."""
