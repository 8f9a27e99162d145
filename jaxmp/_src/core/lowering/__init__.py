"""From a primitive to the custom call, or to XLA's own operations."""
