"""The idea of the project: which index of a contraction each mesh axis splits, and what follows from it."""
