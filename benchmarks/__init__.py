"""Our figures beside the papers' and a peer's, measured in the same run.

`harness` runs them (``make bench``, ``make bench-NAME``, ``QUICK=1``), `measure` is how one measures here,
`plots` draws, `markers` keeps the figures in the texts true, `goals` lists all goals.  Every other module is
one benchmark: ``run(quick: bool) -> list[Row]``.  Results, with the machine they are from, are in
``results/``.
"""
