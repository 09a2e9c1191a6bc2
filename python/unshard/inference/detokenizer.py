"""Text of tokens that come one at a time."""

_UNKNOWN = "\ufffd"
_MOST_HELD = 64


class Detokenizer:
    """Gives out text as soon as it is certain: never half of a UTF-8 character, and with the spaces that decoding all tokens at once gives.

    A token can't be decoded alone: sentencepiece-like tokenizers drop the space of the first one, and a character may be spread over
    several. So the tokens behind the last piece of text are decoded again together with the new ones, and what is longer is new.
    (Text Generation Inference and vLLM do the same.)"""

    def __init__(self, tokenizer, skip_special=True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else ()
        self._window, self._old, self._shown = [], 0, ""        # tokens; how many of them are shown already; as what
        self.length = 0                                          # characters given out

    def add(self, token):
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window, skip_special=False)
        # A half character decodes as U+FFFD. So does garbage, and the character itself: it comes with the next token, or when that many
        # tokens never made sense.
        if text.endswith(_UNKNOWN) and len(self._window) - self._old < _MOST_HELD:
            return ""
        return self._give(text)

    def finish(self):
        """What was held back: half a character that nothing completes any more."""
        return self._give(self._tokenizer.decode(self._window, skip_special=False))

    def _give(self, text):
        new = text[len(self._shown):]
        if new:
            self._window = self._window[self._old:]
            self._old, self._shown = len(self._window), self._tokenizer.decode(self._window, skip_special=False)
            self.length += len(new)
        return new
