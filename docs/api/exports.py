"""Extension of the API reference: which names of a package are public."""

from typing import Any

from griffe import Extension, Module


class LazyExports(Extension):
    """Takes a package's imports for type checkers as its ``__all__``.

    The packages import their public names on first use, and make ``__all__`` of a table that static
    analysis cannot read.
    """

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Sets the public names of a package that has read none from ``__all__``."""
        if not pkg.exports:
            pkg.exports = [name for name, member in pkg.members.items() if member.is_alias]
