"""The papers' tables as grids of cells, each computed once, here or on a cluster."""
