"""One language for selectors, policies, addresses, targets and searches.

Text is parsed once into one tree, and the tree has three back ends that always agree.  Nothing here does I/O.

    text ── parser ──> ast ──> normal ──> closure   one message
            (lexer,                  ├──> vectors   columns (`columns`, `numeric`)
             builder)                └──> sql       text for an engine (`dialects`)

`types` defines the types of values, and models; `values` and `like_patterns` have the rules that all back
ends share; `analysis.type_check` and `analysis.explanation` report mistakes in a condition, and why it was
not true; `limits` and `analysis.cost` limit and measure it; `syntax.printer` writes it as text. The language
is described in docs/reference/predicates.md.
"""
