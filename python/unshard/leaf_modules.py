"""Modules to be fetched as one unit. Parameters are made whole when operators touch them, so the marks change nothing; they are kept for
scripts that read them back."""
import weakref

_marked = weakref.WeakSet()


def z3_leaf_module(model):
    """Whether this module is marked."""
    return model in _marked


def set_z3_leaf_module(model, flag):
    """Mark or unmark one module."""
    (_marked.add if flag else _marked.discard)(model)


def get_z3_leaf_modules(model):
    """All marked modules in `model`."""
    return [m for m in model.modules() if m in _marked]


def _is_one_of(module, classes):
    return any(type(module).__name__ == c or f"{type(module).__module__}.{type(module).__qualname__}" == c if isinstance(c, str)
               else isinstance(module, c) for c in classes)


def _of_classes(model, classes, flag, raise_if_not_found):
    for given in classes:
        if not isinstance(given, (type, str)):
            raise ValueError(f"[z3_leaf_module] classes are types or names of types, got {given!r}")
    chosen = []
    model.apply(lambda m: chosen.append(m) if _is_one_of(m, classes) else None)          # children before parents, as DeepSpeed lists them
    if not chosen and raise_if_not_found:
        raise ValueError(f"[z3_leaf_module] no module of {type(model).__name__} is a {' or a '.join(map(str, classes))}")
    for module in chosen:
        set_z3_leaf_module(module, flag)
    return chosen


def set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Mark all modules of these classes (types or names). Returns them."""
    return _of_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Take those marks away."""
    return _of_classes(model, leaf_module_classes, False, raise_if_not_found)


def _of_names(model, wanted, flag, raise_if_not_found, fits):
    chosen, missing, named = {}, [], list(model.named_modules())
    for want in wanted:
        found = [m for name, m in named if fits(name, want)]
        chosen.update((id(m), m) for m in found)
        if not found:
            missing.append(want)
    if missing and raise_if_not_found:
        raise ValueError(f"[z3_leaf_module] {type(model).__name__} has no module {' and none '.join(map(repr, missing))}")
    for module in chosen.values():
        set_z3_leaf_module(module, flag)
    return list(chosen.values()), missing


def set_z3_leaf_modules_by_name(model, module_names, flag=True, raise_if_not_found=True):
    """Mark (or with `flag` False unmark) modules by their full names. Returns them, and the names that no module has."""
    return _of_names(model, module_names, flag, raise_if_not_found, str.__eq__)


def set_z3_leaf_modules_by_suffix(model, module_name_suffixes, flag=True, raise_if_not_found=True):
    """The same by how names end."""
    return _of_names(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def z3_leaf_parameter(parameter):
    """Whether a marked module has this parameter."""
    return any(p is parameter for module in _marked for p in module.parameters())
