"""What may change without changing the function: table notation, groups, and a model's table."""
