"""Times of the calls of a program, from JAX's profiler."""
