"""The papers' tables and figures as declared grids of cells, each computed once, here or on a cluster."""
