"""The shipped reward functions: modules with a compute_score of the sequential contract.

equivalence.py compares final answers for them, by notation.py and expression.py.
"""
