"""Chooses patterns from shardings, and runs calls on global arrays, on shards, or under XLA's partitioner."""
