"""What jaxmp needs of the machine: the extension, the environment, rates of hardware, and private parts of JAX."""
