"""The page of `trigon view`: curves, rollouts, times and configurations of runs, in a browser.

index.py finds rollouts, runs.py reads a run while it is written, server.py serves the page and
export.py writes it as one file. static/ is the page itself: HTML, CSS and ES modules without a
build step. Run folders are only read.
"""
