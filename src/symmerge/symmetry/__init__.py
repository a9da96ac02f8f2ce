"""What may change without changing the function: the notation of tables, groups, and the table of a model."""
