"""The ``muster`` command: parses arguments, calls a client, and prints the result.

Commands import large modules only when they run, to keep the start of every command quick.
"""
