"""Versions of the libraries that can change a result."""

from importlib.metadata import version


def installed_versions() -> dict[str, str]:
    """Package name -> version."""
    return {name: version(name) for name in ("symmerge", "torch", "transformers", "numpy", "scipy")}
