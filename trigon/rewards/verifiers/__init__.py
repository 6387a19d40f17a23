"""The shipped reward functions, each a module with a compute_score of the sequential contract."""
