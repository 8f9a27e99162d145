"""From shardings to patterns: a call on global arrays, on shards, or under XLA's partitioner."""
