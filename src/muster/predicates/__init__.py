"""One language for selectors, policies, addresses, targets and searches.

Text is parsed once into one tree, and the tree has three back ends that always agree.  Nothing here does I/O.

    text ── parser ──> ast ──> normal ──> closure   one message
            (lexer,                  ├──> vectors   columns (`columns`, `numeric`)
             builder)                └──> sql       text for an engine (`dialects`)

`types` names what values can be, and models; `values` and `like` hold the rules that all share; `check` and
`explain` tell users what is wrong with a condition, and why it did not hold; `limits` and `cost` bound and
measure it; `text` writes it back.  The language itself is described in docs/reference/predicates.md.
"""
