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


def _mark(chosen, flag, what):
    if not chosen:
        raise ValueError(f"[z3_leaf_module] no module of the model matches {what}")
    for module in chosen:
        set_z3_leaf_module(module, flag)
    return chosen


def set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Mark all modules of these classes (types or names)."""
    chosen = [m for m in model.modules() if _is_one_of(m, leaf_module_classes)]
    return _mark(chosen, True, leaf_module_classes) if chosen or raise_if_not_found else []


def unset_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Take those marks away."""
    chosen = [m for m in model.modules() if _is_one_of(m, leaf_module_classes)]
    return _mark(chosen, False, leaf_module_classes) if chosen or raise_if_not_found else []


def set_z3_leaf_modules_by_name(model, module_names, raise_if_not_found=True):
    """Mark modules by their full names."""
    chosen = [m for n, m in model.named_modules() if n in module_names]
    return _mark(chosen, True, module_names) if chosen or raise_if_not_found else []


def set_z3_leaf_modules_by_suffix(model, module_name_suffixes, raise_if_not_found=True):
    """Mark modules whose names end so."""
    chosen = [m for n, m in model.named_modules() if n.endswith(tuple(module_name_suffixes))]
    return _mark(chosen, True, module_name_suffixes) if chosen or raise_if_not_found else []
