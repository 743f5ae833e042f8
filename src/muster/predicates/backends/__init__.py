"""Evaluation: Python function, columns, SQL."""
