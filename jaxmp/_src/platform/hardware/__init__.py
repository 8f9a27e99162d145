"""Describes this machine, gives the rates of machines, and predicts the time of a call on them."""
