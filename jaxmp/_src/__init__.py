"""The implementation; nothing in here is public."""
