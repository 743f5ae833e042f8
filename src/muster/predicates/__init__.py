"""One language for selectors, policies, addresses, targets and searches.

Text is parsed once into one tree, and the tree has three back ends that always agree.  Nothing here does I/O.

    text ── parser ──> ast ──> normal_forms ──> python    one message, as a function
            (lexer)                        ├──> columnar  columns (`columns`, `numeric`)
                                           └──> sql       text for Spark

`types` defines the types of values, and models; `values` and `like_patterns` have the rules that all back
ends share; `analysis.type_check` and `analysis.explanation` report mistakes in a condition, and why it was
not true; `limits` and `analysis.cost` limit and measure it; `syntax.printer` writes it as text. The language
is described in docs/reference/predicates.md.
"""
