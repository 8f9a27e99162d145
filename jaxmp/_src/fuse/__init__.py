"""A function transformation: the products of a function, and the communication around them, become jaxmp's calls."""
