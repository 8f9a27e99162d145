"""Access to the machine: the extension, the environment, rates of hardware, and private parts of JAX."""
