"""What a connector says when its engine is not there."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def missing(package: str, tested: str, cause: ImportError) -> ImportError:
    """The error of a connector whose engine can't be imported; names the package and the tested release."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return ImportError(
            f"this connector needs {package}, which is not installed; tested with {package}=={tested}"
        )
    return ImportError(
        f"this connector needs {package} like {tested}, but {package} {found} lacks a part of it: {cause}"
    )
