"""What libraries reach through `engine.optimizer.parameter_offload` at stage 3. TRL and others take DeepSpeed's hooks off the modules
before they generate and put them on again afterwards; there are none here, so each step finds nothing to do."""


class WithoutHooks:
    """The model's module, as that code walks through it: its own names, and the parameters registered from elsewhere (none)."""

    def __init__(self, module):
        self._module = module

    def ds_external_parameters(self):
        """(name, parameter) pairs of other modules that this one uses: they need no registration."""
        return iter(())

    def __getattr__(self, name):
        return getattr(self.__dict__["_module"], name)


class ParameterOffload:
    """DeepSpeed's keeper of hooks, without any. One for each engine; what is assigned to it is kept and has no effect."""

    def __init__(self, module):
        self.module = WithoutHooks(module)
        self.forward_hooks = []
        self.backward_hooks = []

    def _register_deepspeed_module(self, module):
        """Nothing to register: operators make parameters whole by themselves."""

    _register_hooks_recursively = _register_deepspeed_module


__all__ = ["ParameterOffload"]
