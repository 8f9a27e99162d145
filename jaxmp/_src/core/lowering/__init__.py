"""Lowers primitives to custom calls or to XLA's operations."""
