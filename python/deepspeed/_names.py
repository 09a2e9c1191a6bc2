"""Lazy names: where each lives, and one clear error for those that aren't there yet."""
import importlib
import sys


class NotAvailable(AttributeError, NotImplementedError):
    """A name of DeepSpeed's that unshard doesn't have yet (`hasattr` is False)."""


def attribute_table(package, home, modules=(), later=()):
    """`__getattr__` and `__dir__` of a module: names looked up in `home` ({name: (module, name there)}), submodules imported, and
    NotAvailable raised for `later`."""

    def __getattr__(name):
        if name in home:
            module, attribute = home[name]
            if module == package:
                value = importlib.import_module(f"{package}.{attribute}")
            else:
                value = getattr(importlib.import_module(module), attribute)
            setattr(sys.modules[package], name, value)
            return value
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name in later:
            raise NotAvailable(f"{package}.{name} is not available in unshard yet")
        raise AttributeError(f"module '{package}' has no attribute {name!r}")

    def __dir__():
        return sorted([*vars(sys.modules[package]), *home, *modules])

    return __getattr__, __dir__
