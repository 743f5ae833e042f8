"""Virtual fleets: thousands to a million machines in a few processes, seeded, with faults on command.

Only the fleet is simulated; the bus, the channels and everything above are real.
"""
