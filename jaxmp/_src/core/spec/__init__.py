"""The frozen description of a call, and the tables of the values that its fields take."""
