"""What a traced program does, call by call, and what it costs."""
