"""Learning curves of runs: which runs belong together, their numbers, and the figure."""
