"""The frozen description of a call, and the tables of its words."""
