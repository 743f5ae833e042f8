"""The log of persistent messages: pages, journal, ledger, checkpoints."""
