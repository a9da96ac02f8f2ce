"""Solvers: each finds one group element per space, with evidence."""
