"""Jobs of several processes: how they start, find each other and notice that one has ended."""
