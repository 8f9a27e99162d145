"""The only users of JAX's private parts and of JAX's version."""
