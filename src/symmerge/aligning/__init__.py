"""Align models: `align`, `align_many` and `same` (canonical forms, a solver, verification)."""
