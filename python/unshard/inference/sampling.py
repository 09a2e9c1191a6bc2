"""What a request may ask for, in Python."""
import dataclasses


@dataclasses.dataclass
class SamplingParams:
    """How tokens are chosen, and when a text ends. Names, ranges and defaults of unshard/inference/sampling.h, and what Python adds.

    Raises ValueError naming the option (here for what only Python knows, else when the request is submitted)"""
    max_tokens: int | None = 16           # generated tokens at most; None: as many as the context holds
    min_tokens: int = 0                   # no end token before this many, unless regex or json_schema leave nothing else
    n: int = 1                            # sequences of each prompt
    temperature: float = 1.0              # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = 0                        # 0 or -1: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict | None = None        # {token: added to its logit}
    logprobs: int | None = None           # report each token's log-probability, and this many likeliest ones
    stop: str | list = ()                 # text that ends the output, and isn't part of it
    stop_token_ids: list = ()
    ignore_eos: bool = False
    priority: int = 0                     # lower runs first
    skip_special_tokens: bool = True      # leave them out of the text
    regex: str | None = None              # the output matches it
    json_schema: dict | None = None       # the output is JSON of this schema; {}: any JSON

    def __post_init__(self):
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise ValueError(f"stop {self.stop!r}: a text, or a list of texts, none of them empty")
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"n {self.n!r}: at least 1")
        if self.regex is not None and self.json_schema is not None:
            raise ValueError("regex and json_schema: give one of them")

    def engine_options(self):
        """Of RequestOptions and SamplingOptions, flat."""
        same = ("min_tokens", "n", "ignore_eos", "priority", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                "frequency_penalty")
        options = {name: getattr(self, name) for name in same}
        options["max_tokens"] = -1 if self.max_tokens is None else self.max_tokens
        options["top_k"] = max(self.top_k, 0)
        options["stop_tokens"] = list(self.stop_token_ids)
        options["logprobs"] = -1 if self.logprobs is None else self.logprobs
        if self.seed is not None:
            options["seed"] = self.seed & (2**64 - 1)
        if self.logit_bias:
            options["logit_bias"] = {int(token): float(bias) for token, bias in self.logit_bias.items()}
        return options
