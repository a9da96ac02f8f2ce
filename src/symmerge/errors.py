"""What users may see go wrong. Every message says what, where, and the remedy; `assert` is for our own bugs."""


class SymmergeError(Exception):
    """The base of everything symmerge raises on purpose: the command line prints it as one line and exits with 2."""


class NotationError(SymmergeError):
    """A line of an architecture table does not parse."""


class CheckpointError(SymmergeError):
    """A checkpoint cannot be read or written: missing, corrupt, quantised, no space, no permission."""


class UnsupportedModel(SymmergeError):
    """The architecture, or one of its settings, has no table here."""


class MismatchError(SymmergeError):
    """Two things that must belong together do not: two models, a model and an alignment, a table and a tensor."""


class SymmetryError(SymmergeError):
    """An element was asked to act where its group is not a symmetry."""


class FunctionChanged(SymmergeError):
    """The gate refused: what was about to be written does not compute what it should."""


class DataError(SymmergeError):
    """Data cannot be used: missing, unreadable, too little of it, or without what the task needs."""


class SymmergeWarning(UserWarning):
    """What is done as asked, but may not be what was wanted: the command line prints it as one line and goes on."""
