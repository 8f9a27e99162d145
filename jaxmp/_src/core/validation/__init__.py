"""What users pass, judged one argument at a time."""
