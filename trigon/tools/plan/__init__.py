"""Plans a run before it starts: batches, memory, operations, time, bytes, disk."""
