"""Versions of the libraries that can change a result."""

from importlib.metadata import version

import symmerge


def installed_versions() -> dict[str, str]:
    """Package name -> version. Ours is that of the code, which need not be installed."""
    others = ("torch", "transformers", "numpy", "scipy")
    return {"symmerge": symmerge.__version__, **{name: version(name) for name in others}}
