"""What our tests and our users' tests share: a pytest plugin, fixtures, a virtual clock, `eventually`.

Nothing in the product imports this folder.
"""
