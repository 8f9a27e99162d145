"""A function transformation: turns a function's products, and the communication around them, into calls of jaxmp."""
