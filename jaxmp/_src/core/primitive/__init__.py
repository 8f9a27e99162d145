"""The primitives and their rules: tangents, cotangents, batches, and the collectives around calls."""
