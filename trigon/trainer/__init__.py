"""EasyR1's module path, and nothing else."""
