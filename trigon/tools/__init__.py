"""What is around a run: commands, checks, plans, evaluations, pages, plots.

The core imports none of it.
"""
