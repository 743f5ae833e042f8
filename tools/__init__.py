"""Programs for working on Muster itself; nothing of the product imports them."""
