"""A table for a module that nobody wrote one for: traced, followed axis by axis, and proved."""
