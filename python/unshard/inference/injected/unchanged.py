"""The engine computes what a module's configuration says: a module that somebody has changed since would be computed without the change."""
import torch

_HOOKS = {"_forward_hooks": "a forward hook", "_forward_pre_hooks": "a forward pre-hook"}
_LIBRARIES = ("torch", "transformers", "unshard")


def check(module):
    """Raises NotImplementedError naming the submodule that has hooks, a forward of its own, or another class than transformers gives it."""
    for name, part in module.named_modules():
        if change := _change(part):
            raise NotImplementedError(f"[init_inference] {_where(name, part)} has {change}, which replace_with_kernel_inject=True would "
                                      "leave out; remove it, or leave replace_with_kernel_inject off")
    built = _built_anew(module)
    if built is None:
        return
    kinds = {name: type(part) for name, part in built.named_modules()}
    for name, part in module.named_modules():
        if kinds.pop(name, None) is not type(part):
            raise NotImplementedError(f"[init_inference] {_where(name, part)} isn't what transformers builds of this configuration; "
                                      "replace_with_kernel_inject=True would leave the change out: leave it off")
    if kinds:
        raise NotImplementedError(f"[init_inference] the module has no '{next(iter(kinds))}', which transformers builds of this "
                                  "configuration; leave replace_with_kernel_inject off")


def _change(part):
    if not _of_a_library(type(part).forward):
        return f"a forward() of {type(part).forward.__module__}"
    if "forward" in vars(part):
        return "a forward() that was put in place of its class's"
    for attribute, what in _HOOKS.items():
        for hook in getattr(part, attribute).values():
            if not _of_a_library(hook):                    # transformers' own record outputs
                return f"{what} ({getattr(hook, '__qualname__', type(hook).__name__)})"
    return None


def _of_a_library(function):
    return (getattr(function, "__module__", None) or "").partition(".")[0] in _LIBRARIES


def _built_anew(module):
    """The same kind of module without memory, or None where its class can't be built so."""
    try:
        with torch.device("meta"):
            return type(module)(module.config)
    except Exception:
        return None


def _where(name, part):
    return f"'{name}' ({type(part).__name__})" if name else f"the module ({type(part).__name__})"
