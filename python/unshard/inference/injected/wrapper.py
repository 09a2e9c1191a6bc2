"""The module that init_inference returns."""
import contextlib
import shutil
import tempfile
import threading
import time
import weakref

import torch
import torch.distributed as dist

from unshard.inference.injected import generation, unchanged
from unshard.loggers import logger

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8"}
_NO_MATTER = ("use_cache", "return_dict")          # of forward: no cache and no tuple comes back
_MANY = 1 << 20                                    # rows of one call of generate(), and more
_CACHE_TOKENS = 16384                              # at least; more where the model's context or max_out_tokens is longer


class InferenceEngine(torch.nn.Module):
    """Callable like the module it wraps. `.module`: that module. `generate()`, where it has one: transformers', for one beam. Unknown
    attributes are the module's. destroy() (or dropping it) frees the engine's memory and threads.

    profile_model_time() and model_times(): how many milliseconds each forward took since. is_compiled: whether compile() was called."""

    def __init__(self, module, settings):
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise ValueError(f"[init_inference] model is {type(module).__name__}; a torch.nn.Module is wanted")
        self.settings = self._config = settings
        self.mp_group, self.is_compiled = None, False
        self._kernels = self._times = None
        if settings.kernels:
            self.module = module.eval()
            self._kernels = _Kernels(module, settings)
            self._finalizer = weakref.finalize(self, self._kernels.close)
        else:
            if settings.dtype == torch.int8:
                raise NotImplementedError("[init_inference] dtype int8 needs replace_with_kernel_inject=True")
            self.module = module.to(settings.dtype)                # its mode stays: who wants dropout left out says eval()
            _check_policy(module, settings.injection_policy)
            if settings.tp_size > 1:
                self.mp_group = _same_on_all(settings.tp_size)
        if hasattr(module, "generate"):
            self.generate = self._generate

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *arguments, **keywords):
        """With kernels: (input_ids, attention_mask=None) -> CausalLMOutput with `logits`, [batch, tokens, vocabulary], 0 for padding."""
        begin = time.perf_counter()
        found = (self.module if self._kernels is None else self._kernels.forward)(*arguments, **keywords)
        if self._times is not None:
            self._times.append(1e3 * (time.perf_counter() - begin))
        return found

    def profile_model_time(self, use_cuda_events=True):
        self._times = [] if self._times is None else self._times

    def model_times(self):
        """Of the forwards since the last call. Raises RuntimeError where profile_model_time() wasn't called."""
        if self._times is None:
            raise RuntimeError("[init_inference] model_times() before profile_model_time(): nothing was measured")
        found, self._times = self._times, []
        return found

    def compile(self, backend="inductor", compile_kwargs=None):
        if self._kernels is None and not self.is_compiled:
            self.module.compile(backend=backend, **(compile_kwargs or {}))
            self.is_compiled = True

    def _generate(self, *arguments, **keywords):
        given, most = keywords.get("input_ids"), self.settings.input_limit
        if most is not None and given is not None and given.shape[-1] > most:
            raise RuntimeError(f"[generate] the input has {given.shape[-1]} tokens and max_out_tokens of init_inference is {most}; "
                               "set it higher")
        if self._kernels is None:
            beams = keywords.get("num_beams") or getattr(keywords.get("generation_config"), "num_beams", 1)
            if (beams or 1) > 1:
                raise NotImplementedError("[generate] num_beams above 1 isn't built; use num_beams=1, or engine.module.generate()")
            return self.module.generate(*arguments, **keywords)
        return self._kernels.generate(*arguments, **keywords)

    def destroy(self):
        if self._kernels is not None:
            self._finalizer()


def _check_policy(module, policy):
    """Raises ValueError for what names no layer of this module: on one rank, or whole on each, that is all an injection policy does."""
    names = [name for name, _ in module.named_modules()]
    for kind, layers in policy.items():
        if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
            raise ValueError(f"[init_inference] injection_policy: {kind!r} isn't a class of modules")
        for layer in (layers,) if isinstance(layers, str) else layers:
            if not any(name.endswith(layer) for name in names):
                raise ValueError(f"[init_inference] injection_policy: the module has no layer whose name ends with '{layer}'")


def _same_on_all(tp_size):
    """Without kernels each rank computes the whole module; the group of the ranks, whose random draws are rank 0's from now on."""
    from unshard import distributed
    distributed.init_distributed()
    if dist.get_world_size() < tp_size:
        raise ValueError(f"[init_inference] tp_size is {tp_size} and there are {dist.get_world_size()} ranks; start as many: "
                         f"unshard run --num_gpus {tp_size} SCRIPT")
    if dist.get_rank() == 0:
        logger.warning(f"[init_inference] tensor_parallel.tp_size {tp_size} without replace_with_kernel_inject=True: modules aren't split "
                       "(AutoTP isn't built), each rank holds and computes the whole one. The results are the same; memory and time a rank "
                       "are those of one rank")
    state = [torch.get_rng_state()]
    dist.broadcast_object_list(state, src=0)
    torch.set_rng_state(state[0])
    return dist.new_group(list(range(tp_size)))


@contextlib.contextmanager
def _saved_by_first(module):
    """The same for ranks of one host: rank 0 saves for all (transformers lets no other rank write)."""
    with contextlib.ExitStack() as stack:
        said = [None, None]
        if dist.get_rank() == 0:
            try:
                said = [stack.enter_context(_saved(module)), None]
            except Exception as error:                           # told to all, so that none waits
                said = [None, error]
        dist.broadcast_object_list(said, src=0)
        if said[1] is not None:
            raise said[1]
        yield said[0]
        dist.barrier()                                           # all have read it


@contextlib.contextmanager
def _saved(module):
    """A folder with the module's weights, in memory where there is room."""
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    with contextlib.suppress(OSError):
        place = "/dev/shm" if shutil.disk_usage("/dev/shm").free > 2 * size else None
    folder = tempfile.mkdtemp(prefix="unshard_inject_", dir=place)
    try:
        with _without_gguf(module):
            module.save_pretrained(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _without_gguf(module):
    """A module of a GGUF file holds plain weights, which transformers expanded, and still won't be saved as long as it knows its origin."""
    origin, config = getattr(module, "hf_quantizer", None), getattr(module.config, "quantization_config", None)
    if getattr(config, "quant_method", None) != "gguf":
        yield
        return
    module.hf_quantizer = None
    del module.config.quantization_config
    try:
        yield
    finally:
        module.hf_quantizer, module.config.quantization_config = origin, config


def device_of(module):
    """As the engine calls where a module's weights are: "cpu", "cuda:0"."""
    for parameter in module.parameters():
        if parameter.device.type == "cuda":
            return f"cuda:{parameter.device.index or 0}"
    return "cpu"


class _Kernels:
    """The engine that computes for the module; on several ranks, with the others."""

    def __init__(self, module, settings):
        from unshard.core import _core
        if not hasattr(module, "save_pretrained") or not hasattr(module, "config"):
            raise ValueError(f"[init_inference] replace_with_kernel_inject=True needs a Hugging Face model, and {type(module).__name__} "
                             "isn't one; leave it off")
        unchanged.check(module)
        self._config, self._generation_owner = module.config, module
        comm = None
        if settings.tp_size > 1:
            from unshard import distributed
            distributed.init_distributed()
            if dist.get_world_size() != settings.tp_size:
                raise ValueError(f"[init_inference] tp_size is {settings.tp_size} and there are {dist.get_world_size()} ranks; "
                                 f"start as many: unshard run --num_gpus {settings.tp_size} SCRIPT")
            comm = distributed.make_communicator()
        options = {"device": device_of(module), "dtype": _NAMES[settings.dtype], "max_waiting": _MANY, "threads": torch.get_num_threads(),
                   "kv_cache_tokens": max(_CACHE_TOKENS, settings.max_out_tokens)}
        with (_saved_by_first if comm is not None else _saved)(module) as folder:
            self._engine = _core.InferenceEngine(folder, options, comm)
        self._context = self._engine.model()["context"]
        self._vocab = self._engine.model()["vocab"]
        self._lock = threading.Lock()
        self._several = comm is not None
        self._rank = dist.get_rank() if self._several else 0
        self._follower = None
        if self._rank > 0:
            self._follower = threading.Thread(target=self._engine.follow, daemon=True)
            self._follower.start()

    def close(self):
        if self._follower is not None:
            self._follower.join(timeout=60)
        self._engine.close()

    def _shared(self, compute):
        """What `compute` gives on rank 0, on every rank."""
        if not self._several:
            return compute()
        value, error = None, None
        if self._rank == 0:
            try:
                value = compute()
            except Exception as caught:                          # told to all, so that none waits
                error = caught
        said = [value, error]
        dist.broadcast_object_list(said, src=0)
        if said[1] is not None:
            raise said[1]
        return said[0]

    def forward(self, input_ids=None, attention_mask=None, **keywords):
        from transformers.modeling_outputs import CausalLMOutput
        asked = sorted(key for key, value in keywords.items() if value is not None and value is not False and key not in _NO_MATTER)
        if asked:
            raise NotImplementedError(f"[init_inference] forward with {', '.join(asked)} isn't built; engine.module has it")
        prompts = generation.prompts_of(input_ids, attention_mask)
        rows = self._shared(lambda: [self._logits(prompt) for prompt in prompts])
        logits = torch.zeros(*input_ids.shape, self._vocab)
        for i, row in enumerate(rows):
            logits[i, input_ids.shape[1] - len(row):] = row
        return CausalLMOutput(logits=logits.to(input_ids.device))

    def _logits(self, prompt):
        if not prompt:
            return torch.zeros(0, self._vocab)
        return torch.frombuffer(bytearray(self._engine.logits(prompt)), dtype=torch.float32).view(len(prompt), self._vocab)

    def generate(self, inputs=None, generation_config=None, input_ids=None, attention_mask=None, **keywords):
        ids = inputs if inputs is not None else input_ids
        config = generation.generation_config(self._generation_owner, generation_config, keywords)
        prompts = generation.prompts_of(ids, attention_mask)
        requests = [generation.request_options(config, ids.shape[1], len(prompt), self._context, self._vocab) for prompt in prompts]
        answers = self._shared(lambda: self._answers(prompts, requests))
        ends = generation.as_list(config.eos_token_id)
        pad = config.pad_token_id if config.pad_token_id is not None else ends[0] if ends else 0
        return generation.joined(ids, answers, pad)

    def _answers(self, prompts, options):
        """Per prompt, per sequence: the generated tokens."""
        with self._lock:
            requests = {self._engine.submit(prompt, of_prompt): i for i, (prompt, of_prompt) in enumerate(zip(prompts, options))}
            answers = [[[] for _ in range(of_prompt["n"])] for of_prompt in options]
            left = sum(len(several) for several in answers)
            try:
                while left:
                    for request, index, token, _, _, finish, error in self._engine.poll(1.0):
                        if request not in requests:
                            continue                             # the last of a call that an exception ended
                        if error:
                            raise RuntimeError(f"[generate] {error}")
                        if token >= 0:
                            answers[requests[request]][index].append(token)
                        left -= bool(finish)
            except BaseException:
                for request in requests:
                    self._engine.cancel(request)
                raise
            return answers
