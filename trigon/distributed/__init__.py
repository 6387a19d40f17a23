"""Multi-GPU execution: a Ray worker group that the driver uses like engines of its own process."""
