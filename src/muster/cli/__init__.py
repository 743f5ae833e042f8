"""The ``muster`` command: thin.  It parses arguments, calls a client, and prints.

Nothing heavy is imported before the command that needs it runs.
"""
