"""The extension, the libraries, the environment, JAX's versions and the other processes."""
