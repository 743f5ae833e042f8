"""The dashboard: pages rendered on the server and readable without a script; a small script updates them.

A page is a list of *sections*.  Each is rendered from `muster.web.data.read_model`, and again when its data
changes.
"""
