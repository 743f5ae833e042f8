"""Analyses of the history and of stored notifications with Spark: capacity reports, forecasts, outliers,
replay of alerts and policies, demand for contexts.

They read what the pipeline and the notifiers have stored, run when a user asks for them, and write nothing.
"""
