"""How much memory a model's states will take, before training it: 16-bit weights, fp32 gradients, fp32 master weights and two fp32 moments
(Adam), which is what `engine.memory_report()` counts then. Bytes."""
from dataclasses import dataclass

from unshard import owners

_WEIGHT, _GRADIENT, _OPTIMIZER = 2, 4, 12          # a parameter's bytes: 16 bit; fp32; fp32 master and two moments
_BUILT = 4                                         # while the model is being built: fp32, in host memory


@dataclass
class Estimate:
    """A rank's share on its device, and what its host needs for all of its ranks."""
    device_bytes: int
    host_bytes: int
    largest_layer_bytes: int       # of device_bytes, what the largest layer takes while it is whole (stage 3)
    options: dict


def sizes_of(model):
    """(elements of all parameters, of the largest layer's own); partitioned models too, tied weights once."""
    sizes = {id(p): owners.find(p).store.info(owners.find(p).id)["numel"] if owners.find(p) is not None else p.numel()
             for p in model.parameters()}
    layers = [sum(sizes[id(p)] for p in module.parameters(recurse=False)) for module in model.modules()]
    return sum(sizes.values()), max(layers, default=0)


def zero2(total, ranks_a_host=1, hosts=1, offload=True, buffer_factor=1.5):
    """Stages 1 and 2, of `total` parameters."""
    ranks = ranks_a_host * hosts
    states = (_GRADIENT + _OPTIMIZER) * total
    device = _WEIGHT * total + (0 if offload else -(-states // ranks))
    host = max(_BUILT * total * ranks_a_host, states / hosts if offload else 0) * buffer_factor
    return Estimate(int(device), int(host), 0, {"offload_optimizer": _device(offload)})


def zero3(total, largest_layer, ranks_a_host=1, hosts=1, offload=True, offload_params=True, zero_init=True, buffer_factor=1.5):
    """Stage 3, of `total` parameters, `largest_layer` of which are one layer's."""
    ranks = ranks_a_host * hosts
    layer = (_WEIGHT + _WEIGHT) * largest_layer                                   # its weights and its gradients
    resting = (0 if offload_params and offload else _WEIGHT) + (0 if offload else _GRADIENT + _OPTIMIZER)
    on_host = (_WEIGHT if offload_params and offload else 0) + (_GRADIENT + _OPTIMIZER if offload else 0)
    built = _BUILT * (largest_layer if zero_init else total) * ranks_a_host
    host = max(built, on_host * total / hosts) * buffer_factor
    return Estimate(int(layer - (-(resting * total) // ranks)), int(host), layer,
                    {"offload_param": _device(offload_params and offload), "offload_optimizer": _device(offload),
                     "zero_init": int(zero_init)})


def _device(offloaded):
    return "cpu" if offloaded else "none"


def zero2_table(total, ranks_a_host=1, hosts=1, buffer_factor=1.5):
    return _table(f"ZeRO 2 with {hosts} host(s) of {ranks_a_host} rank(s); {_million(total)} parameters",
                  [zero2(total, ranks_a_host, hosts, offload, buffer_factor) for offload in (True, False)])


def zero3_table(total, largest_layer, ranks_a_host=1, hosts=1, buffer_factor=1.5):
    rows = [zero3(total, largest_layer, ranks_a_host, hosts, offload, params, init, buffer_factor)
            for offload, params in ((True, True), (True, False), (False, False)) for init in (True, False)]
    return _table(f"ZeRO 3 with {hosts} host(s) of {ranks_a_host} rank(s); {_million(total)} parameters, {_million(largest_layer)} in the "
                  "largest layer", rows)


def _million(count):
    return f"{count / 1e6:.0f}M" if count >= 1e6 else f"{count}"


def _table(title, rows):
    lines = [f"Memory for parameters, gradients and optimizer states, {title}.", "    host    |  per device | options"]
    for row in rows:
        options = ", ".join(f"{key}={value}" for key, value in row.options.items())
        lines.append(f"{row.host_bytes / 2**30:8.2f}GB  | {row.device_bytes / 2**30:8.2f}GB  | {options}")
    return "\n".join(lines)
