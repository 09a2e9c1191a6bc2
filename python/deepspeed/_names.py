"""Lazy names: where each lives, and one clear error for those that aren't there yet."""
import importlib
import sys

from deepspeed import _later
from deepspeed._later import NotAvailable

_later.install()


def attribute_table(package, home, modules=()):
    """`__getattr__` and `__dir__` of a module: names looked up in `home` ({name: (module, name there)}), submodules imported, and
    NotAvailable raised for what `_later` lists."""
    # Python asks the finder of `_later` for `from package import name` only where this is a package.
    sys.modules[package].__dict__.setdefault("__path__", [])

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
        if _later.is_later(package, name):
            raise _later.NameNotAvailable(f"{package}.{name}")
        raise AttributeError(f"module '{package}' has no attribute {name!r}")

    def __dir__():
        return sorted([*vars(sys.modules[package]), *home, *modules])

    return __getattr__, __dir__


__all__ = ["NotAvailable", "attribute_table"]
