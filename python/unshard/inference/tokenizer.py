"""Text to tokens and back, by Hugging Face's `tokenizers`."""
import functools
import json
import re

from unshard.inference.chat_template import ChatTemplate, ChatTemplateError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """backend: a `tokenizers.Tokenizer`. chat_template: Jinja source, or None. special_tokens: {"bos_token": "<s>", ...}, names that the
    template may read."""

    def __init__(self, backend, chat_template=None, special_tokens=None):
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = False
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self._template = ChatTemplate(chat_template, self.special_tokens) if chat_template else None
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab = backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self):
        return self._template is not None

    def encode(self, text, add_special_tokens=True, at_most=None):
        """add_special_tokens: what the model wants around a plain prompt (a beginning-of-text token, say). at_most: tokens, these
        included; the text's end is left out. Raises ValueError."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text isn't Unicode: half a surrogate pair at character {error.start}") from error
        if at_most is None:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        found = self.backend.encode(text, add_special_tokens=False)
        found.truncate(max(0, at_most - self.backend.num_special_tokens_to_add(False)))
        return self.backend.post_process(found).ids

    def decode(self, tokens, skip_special=True):
        return self.backend.decode(tokens, skip_special_tokens=skip_special)

    def chat_prompt(self, messages, /, **options):
        """The conversation as the model was trained to read it, up to where its answer begins. Raises ChatTemplateError, a ValueError."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template: use plain completions")
        return self._template.render(messages, **options)

    def chat(self, messages, /, **options):
        return self.encode(self.chat_prompt(messages, **options), add_special_tokens=False)     # the template writes them itself

    def token_bytes(self, token):
        """What one token stands for; may be a part of a UTF-8 character."""
        name = self.backend.id_to_token(token)
        if name is None:
            return b""
        if token in self._added:
            return name.encode()
        byte_level, byte_fallback, space = self._decoding
        if byte_level and all(c in _byte_of_char() for c in name):
            return bytes(_byte_of_char()[c] for c in name)
        if byte_fallback and (match := _BYTE.fullmatch(name)):
            return bytes([int(match[1], 16)])
        return (name.replace(space, " ") if space else name).encode()

    @functools.cached_property
    def _decoding(self):
        """(bytes are written as characters, bytes are written as <0xAB>, the character that stands for a space)"""
        if self.backend.decoder is None:
            return False, False, None
        parts = list(_parts(json.loads(self.backend.decoder.__getstate__())))
        kinds = {part["type"] for part in parts}
        spaces = [part["replacement"] for part in parts if part["type"] == "Metaspace"]
        spaces += [part["pattern"].get("String") for part in parts if part["type"] == "Replace" and part["content"] == " "]
        return "ByteLevel" in kinds, "ByteFallback" in kinds, spaces[0] if spaces else None


def _parts(decoder):
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    else:
        yield decoder


@functools.cache
def _byte_of_char():
    """GPT-2's table: bytes that can be seen stand for themselves, the others for characters from 256 up."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {**{chr(byte): byte for byte in visible}, **{chr(256 + i): byte for i, byte in enumerate(hidden)}}
