"""Products: the public functions, their checks, plans, primitives and lowerings."""
