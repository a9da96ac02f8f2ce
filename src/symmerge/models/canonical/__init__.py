"""The canonical form: the same function with every free gauge fixed. Exact, lazy, recorded."""
