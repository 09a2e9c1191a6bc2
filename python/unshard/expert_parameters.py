"""Which parameters are an expert's (of a mixture of experts) and which are shared, for scripts that sort them before they ask whether the
model has experts at all.

There are no layers of experts yet, so a model that can be made here has none, and sorting changes nothing. A parameter that carries the
mark of one all the same (`allreduce = False`) can't be trained rightly: its gradients would be summed over all ranks. It is refused.
"""


def is_moe_param(param):
    """Whether the parameter carries the mark of an expert's."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group):
    """Whether the group was made for experts."""
    return bool(param_group.get("moe", False))


def has_moe_layers(m):
    """(whether the module has layers of experts, how many experts the last of them has): (False, 0)."""
    return False, 0


def split_params_into_shared_and_expert_params(params):
    """(shared parameters, parameters of experts): (all of them, none)."""
    return _without_experts(params), []


def split_params_grads_into_shared_and_expert_params(group):
    """(gradients of shared parameters, gradients of experts' parameters), of those parameters that have one."""
    return [parameter.grad for parameter in _without_experts(group) if parameter.grad is not None], []


def split_params_into_different_moe_groups_for_optimizer(param_groups, max_group_size=178956971):
    """The groups as a list, without groups for experts, since there are none. `param_groups`: one group or a list or tuple of them."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"] = _without_experts(group["params"])
    return groups


def configure_moe_param_groups(model_parameters):
    """Groups for the optimizer from a list of parameters (one group comes of it), or from groups, as above."""
    if isinstance(model_parameters, dict):
        raise ValueError("[configure_moe_param_groups] wanted a list of parameters or of groups, got one group; put it in a list")
    items = list(model_parameters)
    if items and isinstance(items[0], dict):
        return split_params_into_different_moe_groups_for_optimizer(items)
    return split_params_into_different_moe_groups_for_optimizer({"params": items, "name": "dense-params"})


def _without_experts(params):
    params = list(params)
    for index, parameter in enumerate(params):
        if is_moe_param(parameter):
            raise NotImplementedError(
                f"[expert_parameters] parameter {index} of {len(params)}, of shape {tuple(parameter.shape)}, is marked as an expert's "
                "(allreduce = False); unshard has no expert parallelism yet and would sum its gradients over all ranks")
    return params
