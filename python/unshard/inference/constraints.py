"""Output that must match a JSON schema or a regular expression, by the library llguidance."""
import json
import threading

# Between JSON's tokens: nothing, a space, or a line's end and indentation. A small model given free choice writes spaces for ever.
_WHITESPACE = {"whitespace_pattern": r"( |\n {0,16})?"}


class Constraints:
    """Grammars over one model's tokens.

    vocab: of the model's logits (may be more than the tokenizer's). end_tokens: allowed where the output may end."""

    def __init__(self, tokenizer, vocab, end_tokens):
        self._tokenizer, self._vocab, self._end_tokens = tokenizer, vocab, list(end_tokens)
        self._tokens, self._lock = None, threading.Lock()

    def compile(self, *, json_schema=None, regex=None):
        """A Grammar. Raises ValueError: a schema or expression that is wrong, uses what isn't supported, or is too complex.

        Up to a second of work, without the GIL; the first time half a second more for the vocabulary."""
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise ValueError("constrained output needs the package llguidance on the server: pip install llguidance") from error
        tokens = self._vocabulary()
        try:
            if regex is not None:
                grammar = LLMatcher.grammar_from_regex(regex)
            else:
                grammar = LLMatcher.grammar_from_json_schema(json.dumps(json_schema), defaults=_WHITESPACE)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema can't be used: {_first_line(error)}") from error
        matcher = LLMatcher(tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"the {'expression' if regex is not None else 'schema'} can't be used: {_first_line(matcher.get_error())}")
        return Grammar(matcher, -(-self._vocab // 32) * 4, self._end_tokens)

    def _vocabulary(self):
        if not self._end_tokens:
            raise ValueError("constrained output needs a model with an end token; this one names none")
        with self._lock:
            if self._tokens is None:
                from llguidance import LLTokenizer
                text = self._tokenizer.backend.to_str()
                self._tokens = LLTokenizer(text, n_vocab=max(self._vocab, self._tokenizer.vocab), eos_token=self._end_tokens)
            return self._tokens


class Grammar:
    """Makes the filter of each sequence: generated tokens -> bit mask of the tokens that may come next."""

    def __init__(self, matcher, mask_bytes, end_tokens):
        self._matcher, self._mask_bytes = matcher, mask_bytes
        self._only_end = bytearray(mask_bytes)
        for token in end_tokens:
            self._only_end[token // 8] |= 1 << token % 8

    def filter(self):
        matcher, seen = self._matcher.deep_copy(), 0

        def allowed(generated):
            """Little-endian 32-bit words. Called on the engine's thread with what this sequence has generated, which only grows."""
            nonlocal seen
            if seen < len(generated):
                matcher.consume_tokens(generated[seen:])
                seen = len(generated)
            if matcher.is_error() or matcher.is_stopped():     # an error: too complex from here on; what can follow isn't known
                return bytes(self._only_end)
            return matcher.compute_bitmask()[:self._mask_bytes]
        return allowed


def _first_line(error):
    return (str(error).strip().splitlines() or ["too complex"])[0][:300]
