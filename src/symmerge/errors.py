"""Errors for users: what, where, and the remedy. `assert` is for our own bugs."""


class SymmergeError(Exception):
    """Base of all errors: the command line prints one line and exits with 2."""


class NotationError(SymmergeError):
    """A line of an architecture table does not parse."""


class CheckpointError(SymmergeError):
    """A checkpoint cannot be read or written."""


class UnsupportedModel(SymmergeError):
    """The architecture, or one of its settings, has no table here."""


class MismatchError(SymmergeError):
    """Two things do not fit together: two models, or a model and an alignment."""


class SymmetryError(SymmergeError):
    """A group element was applied where it is not a symmetry."""


class FunctionChanged(SymmergeError):
    """The gate refused: the new checkpoint does not compute the same function."""


class DataError(SymmergeError):
    """Data cannot be used: missing, unreadable, or too little for the task."""


class SymmergeWarning(UserWarning):
    """The call succeeded, but maybe not as intended: the command line prints one line."""
