"""Nouns and pure arithmetic that every other folder shares.

Contents: the error tree, topics and subjects, the hybrid logical clock, health states, settings, trace
context, log events and metrics. No sockets, event loops, databases or threads. Code in this folder never
reads a clock: the caller passes the time.
"""
