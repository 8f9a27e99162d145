"""JAX's private parts, in one place: nothing else of jaxmp uses them or asks for JAX's version."""
