"""The channel: receive, hold, aggregate, forward."""
