"""An information node: reads, writes, searches, maintenance."""
