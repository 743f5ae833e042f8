"""Nouns and pure arithmetic that every other folder shares.

Here: the error tree, typed ids, topics and subjects, the hybrid logical clock, health states, settings,
trace context, log events and metrics.  Not here: sockets, event loops, databases, threads.  Code in this
folder never reads a clock of its own; whoever calls it brings the time.
"""
