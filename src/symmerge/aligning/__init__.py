"""The front hall: align, align_many, same (canonical forms + solver + proof)."""
