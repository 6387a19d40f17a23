"""What `trigon init` writes: a run, a reward function with its test, and five rows with images."""
