"""transformers' generate() in the engine's words: which of its options are taken, and what they mean here."""
import copy

import torch

# What GenerationConfig may hold that changes nothing here.
_IGNORED = {"bos_token_id", "transformers_version", "use_cache", "_from_model_config", "decoder_start_token_id", "cache_implementation",
            "trust_remote_code", "num_beam_groups", "early_stopping", "length_penalty", "prefill_chunk_size", "disable_compile",
            "compile_config", "remove_invalid_values"}
_TAKEN = {"max_new_tokens", "max_length", "min_new_tokens", "min_length", "do_sample", "temperature", "top_k", "top_p", "min_p",
          "repetition_penalty", "eos_token_id", "pad_token_id", "num_return_sequences", "num_beams"}

# Of the dict that return_dict_in_generate asks for.
_REPORTED = {"output_scores", "output_logits", "output_attentions", "output_hidden_states"}


def _nothing(value):
    """None, False, and the empty lists of logits processors and stopping criteria."""
    return value is None or value is False or (isinstance(value, list) and not value)


def generation_config(model, given, options):
    """A GenerationConfig of the model's own, `given` and the keywords, in this order. Raises NotImplementedError for what isn't built."""
    config = copy.deepcopy(model.generation_config if given is None else given)
    if given is not None:
        config.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)      # as transformers does
    unknown = [name for name, value in config.update(**options).items() if not _nothing(value) and name != "tokenizer"]
    if unknown:
        raise NotImplementedError(f"[generate] {', '.join(sorted(unknown))}: not built; the module's own generate() (engine.module) has it")
    reported = _REPORTED if not config.return_dict_in_generate else set()
    asked = {key for key, value in config.to_diff_dict().items() if value not in (None, False) and key not in _IGNORED | _TAKEN | reported}
    if (config.num_beams or 1) > 1:
        raise NotImplementedError("[generate] num_beams above 1 isn't built; use num_beams=1, or engine.module.generate()")
    if asked:
        raise NotImplementedError(f"[generate] {', '.join(sorted(asked))}: not built; the module's own generate() (engine.module) has it")
    return config


def prompts_of(inputs, mask):
    """Rows of tokens without their padding, which stands on the left. Raises ValueError for padding elsewhere."""
    if inputs is None or inputs.dim() != 2 or inputs.is_floating_point() or not len(inputs):
        raise ValueError("[generate] input_ids [batch, tokens] of whole numbers are wanted")
    if mask is None:
        return inputs.tolist()
    if mask.shape != inputs.shape or (mask[:, 1:].bool() < mask[:, :-1].bool()).any():
        raise ValueError("[generate] attention_mask must be that of padding on the left, of the shape of input_ids")
    return [row[keep.bool()].tolist() for row, keep in zip(inputs, mask)]


def as_list(value):
    return [] if value is None else [int(token) for token in value] if hasattr(value, "__len__") else [int(value)]


def request_options(config, padded, prompt, context, vocab):
    """What InferenceEngine.submit takes for a prompt of that many tokens, padded to `padded`."""
    new = config.max_new_tokens
    if new is None:                                                       # transformers' default: 20 new ones, whatever the prompt's length
        new = 20 if config.max_length is None else config.max_length - padded
    if new < 1:
        raise ValueError(f"[generate] the input has {padded} tokens and max_length is {config.max_length}: nothing is left to generate")
    least = config.min_new_tokens if config.min_new_tokens is not None else max(0, (config.min_length or 0) - padded)
    new = min(new, context - prompt)
    sampling = {"temperature": 0.0}
    if config.do_sample:
        top_k = 50 if config.top_k is None else config.top_k             # transformers' default
        top_p = 1.0 if config.top_p is None else config.top_p
        if top_p <= 0:                                                    # as there, the likeliest token always stays
            top_k, top_p = 1, 1.0
        sampling = {"temperature": float(1.0 if config.temperature is None else config.temperature), "top_k": int(top_k),
                    "top_p": float(min(top_p, 1.0)), "min_p": float(config.min_p or 0.0),
                    "seed": int(torch.randint(1 << 62, ()))}             # so torch.manual_seed() decides here too
    return {"max_tokens": new, "min_tokens": min(least, new), "n": int(config.num_return_sequences or 1), "ignore_eos": True,
            "stop_tokens": [token for token in as_list(config.eos_token_id) if 0 <= token < vocab],     # -1: people's "no end"
            "repetition_penalty": float(config.repetition_penalty or 1.0), **sampling}


def joined(inputs, answers, pad):
    """[rows, tokens]: each input row before each of its answers, padded on the right as transformers does."""
    rows = [(row, answer) for row, several in zip(inputs, answers) for answer in several]
    width = inputs.shape[1] + max(len(answer) for _, answer in rows)
    out = inputs.new_full((len(rows), width), pad)
    for i, (row, answer) in enumerate(rows):
        out[i, :len(row)] = row
        out[i, len(row):len(row) + len(answer)] = torch.tensor(answer, dtype=out.dtype)
    return out
