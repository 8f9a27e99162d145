"""Which operation of a program gives other bits in another batch or on another mesh."""
