"""Checks of users' arguments, one argument at a time."""
