"""The dashboard: pages made on the server, whole, readable without a script; a small script keeps them live.

A page is a list of *sections*; each is made from `muster.web.data.read_model`, and made again when what it
shows changed.  `html` makes markup in which everything is escaped unless it is markup already; `charts` draws
SVG.
"""
