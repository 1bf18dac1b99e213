"""Extensions of the API reference: which names of a package are public, what configs inherit."""

from typing import Any

from griffe import Attribute, Class, Extension, Module, Object


class LazyExports(Extension):
    """Takes a package's imports for type checkers as its ``__all__``.

    The packages import their public names on first use, and make ``__all__`` of a table that static
    analysis cannot read.
    """

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Sets the public names of a package that has read none from ``__all__``."""
        if not pkg.exports:
            pkg.exports = [name for name, member in pkg.members.items() if member.is_alias]


class InheritedFields(Extension):
    """Gives configs the fields of their bases: a reader of ``PonderConfig`` sets ``dim``, too."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Copies documented fields into each class of the package that is named a config."""
        for config in list(_configs(pkg)):
            for name, member in config.inherited_members.items():
                field = member.final_target
                if isinstance(field, Attribute) and field.annotation and field.docstring:
                    config.set_member(name, member)


def _configs(parent: Object) -> Any:
    for member in parent.members.values():
        if member.is_alias:
            continue
        if isinstance(member, Class) and member.name.endswith("Config"):
            yield member
        elif isinstance(member, Module):
            yield from _configs(member)
