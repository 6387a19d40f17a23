"""Plans a run before it starts: batches, memory, operations, disk."""
