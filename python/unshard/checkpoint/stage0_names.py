"""Stage 0 of DeepSpeed numbers the parameters of its optimizer, group by group, and doesn't say their names. Each group is in the order of
the module, so that often only one reading fits the shapes (and, where there are fp32 masters, the values); else the caller must know."""
import functools

import torch

from unshard.checkpoint.stored_tensor import StoredTensor


def names_of_groups(saved, masters):
    """[[name, ...] of each group] and None; or [] and why they can't be told."""
    groups = saved.inner()["param_groups"]
    sizes = [len(group.get("params", [])) for group in groups]
    if saved.group_names is not None:
        if [len(names) for names in saved.group_names] != sizes:
            saved.fail(f"its optimizer has groups of {sizes} parameters, this run's of {[len(names) for names in saved.group_names]}")
        return [list(names) for names in saved.group_names], None
    wanted = [[_wanted(saved, masters, group, i, sum(sizes[:group]) + i) for i in range(size)] for group, size in enumerate(sizes)]
    return _only_reading(saved, wanted)


def _wanted(saved, masters, group, i, index):
    """(shape, master) of the `index`-th parameter, the `i`-th of its group; None for what isn't known."""
    master = masters[group][i] if masters else None
    states = list(saved.states(0, index).values())
    like = master if master is not None else states[0] if states else None
    return (like.shape if like is not None else None), master


def _only_reading(saved, wanted):
    skip = {*(saved.model.get("buffer_names") or []), *saved.shared()}
    candidates = [(name, tensor) for name, tensor in saved.module.items() if name not in skip and isinstance(tensor, StoredTensor)]

    @functools.cache
    def equal(group, i, place):
        shape, master = wanted[group][i]
        tensor = candidates[place][1]
        if shape is not None and shape != tensor.shape:
            return False
        return master is None or torch.equal(master.load().to(tensor.dtype), tensor.load())

    # Readings that lead to each state, walking the module: (next of each group) -> up to two of them.
    readings = {(0,) * len(wanted): [()]}
    for place in range(len(candidates)):
        left, following = len(candidates) - place - 1, {}
        for at, found in readings.items():
            open_ = sum(len(group) - i for group, i in zip(wanted, at))
            moves = [(at, None)] if open_ <= left else []          # None: it is frozen
            moves += [((*at[:g], at[g] + 1, *at[g + 1:]), g) for g in range(len(wanted))
                      if at[g] < len(wanted[g]) and equal(g, at[g], place)]
            for state, group in moves:
                following.setdefault(state, []).extend((*reading, group) for reading in found)
                del following[state][2:]
        readings = following
    found = readings.get(tuple(len(group) for group in wanted), [])
    if len(found) != 1:
        return [], (f"{'no' if not found else 'more than one'} reading of the optimizer's numbered states fits the model's shapes (ZeRO "
                    "stage 0 doesn't name them); they can be loaded into the model they are of, whose groups are known")
    names = [[] for _ in wanted]
    for (name, _), group in zip(candidates, found[0]):
        if group is not None:
            names[group].append(name)
    return names, None
