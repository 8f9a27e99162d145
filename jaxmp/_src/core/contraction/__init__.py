"""Distributed contractions: which index each mesh axis splits, and the communication that follows."""
