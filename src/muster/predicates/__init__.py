"""One language for selectors, policies, addresses, targets and searches.

Text is parsed once into one tree (`ast`), and the tree has three back ends that always agree: a closure
for one message, vectors over columns, SQL text that Spark runs.  Nothing here does I/O.
"""
