"""Virtual fleets: thousands to a million machines in a few processes, seeded, with faults on command.

What is simulated is the fleet; the road, the channels and everything above are the real ones.
"""
