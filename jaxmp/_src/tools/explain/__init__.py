"""Describes the calls of a traced program and their costs."""
