"""The primitives and their rules: tangents, cotangents, batches, and collectives around calls."""
