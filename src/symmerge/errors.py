"""Errors for users: what, where, and the remedy. `assert` is for our own bugs."""

LONGEST = 2000  # characters of a message


class SymmergeError(Exception):
    """Base of all errors: the command line prints one line and exits with 2.

    A message quotes names and values of files, which may be megabytes: it is cut in the middle,
    because the place comes first and the remedy last.
    """

    def __init__(self, message: str = "") -> None:
        half = LONGEST // 2
        cut = f"{message[:half]} ... {message[-half:]}" if len(message) > LONGEST else message
        super().__init__(cut)


def shown(value: object, longest: int = 60) -> str:
    """A value of a file for a message, cut to `longest` characters."""
    text = str(value)[:longest] if isinstance(value, int) else repr(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


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


OVERFLOW = "numbers became infinite or NaN: the weights are too large, use another checkpoint"


class FunctionChanged(SymmergeError):
    """The gate refused: the new checkpoint does not compute the same function."""


class DataError(SymmergeError):
    """Data cannot be used: missing, unreadable, or too little for the task."""


class SymmergeWarning(UserWarning):
    """The call succeeded, but maybe not as intended: the command line prints one line."""
