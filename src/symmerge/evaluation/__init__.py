"""Evaluate models: tasks and their data, metrics, lines (barriers), planes and simplices."""
