"""Machines: what this one is, how fast a machine is, and how long a call takes on it."""
