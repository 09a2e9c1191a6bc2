"""Attributes by a dotted path, such as a module by its name in `named_modules()`."""
import functools


def recursive_getattr(model, module_name):
    """`model.a.b` of "a.b"; AttributeError where there is none."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model, module_name, module):
    """Put `module` at that path."""
    *path, name = module_name.split(".")
    setattr(functools.reduce(getattr, path, model), name, module)
