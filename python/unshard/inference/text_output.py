"""What one sequence says: text of its tokens, cut at a stop string, with each token's place in the text."""
import dataclasses

from unshard.inference.detokenizer import Detokenizer


class StopStrings:
    """Finds the first stop string to be complete in a text that comes in pieces, whatever the pieces' borders.

    Holds back the end of the text as long as it may be the beginning of a stop string (Knuth, Morris and Pratt's automaton for each)."""

    def __init__(self, stops):
        self._patterns = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(self._patterns)
        self._held = ""

    def add(self, text):
        """(text that is decided, whether a stop string is complete: the text before it is all there is)"""
        if not self._patterns:
            return text, False
        whole = self._held + text
        for at, char in enumerate(text, start=len(self._held) + 1):
            for i, (stop, borders) in enumerate(self._patterns):
                n = self._matched[i]
                while n and stop[n] != char:
                    n = borders[n - 1]
                self._matched[i] = n = n + (stop[n] == char)
                if n == len(stop):
                    self._held = ""
                    return whole[:at - n], True
        keep = len(whole) - max(self._matched)
        self._held = whole[keep:]
        return whole[:keep], False

    def finish(self):
        held, self._held = self._held, ""
        return held


def _borders(stop):
    """For each beginning of `stop`: the length of the longest shorter one that it also ends with."""
    borders, n = [0] * len(stop), 0
    for i in range(1, len(stop)):
        while n and stop[n] != stop[i]:
            n = borders[n - 1]
        n += stop[n] == stop[i]
        borders[i] = n
    return borders


@dataclasses.dataclass(slots=True)
class TokenLogprob:
    token: int
    logprob: float
    likeliest: list                 # [(token, logprob)], best first
    offset: int                     # of its first character in the text


@dataclasses.dataclass(slots=True)
class Piece:
    """What is new. `logprobs` are of the tokens whose text is decided."""
    text: str
    logprobs: list
    finish_reason: str | None = None


class Sequence:
    """One of a request's n sequences; `take` the engine's outputs in order."""

    def __init__(self, tokenizer, stops=(), skip_special=True, keep_logprobs=False):
        self.tokens, self.logprobs, self.text = [], [], ""
        self.finish_reason = None            # "stop", "length", "cancelled", "error"
        self.error = ""
        self._detokenizer, self._stops = Detokenizer(tokenizer, skip_special), StopStrings(stops)
        self._keep_logprobs, self._waiting = keep_logprobs, []

    def take(self, token, logprob=0.0, likeliest=(), finish="", error=""):
        """A Piece, or None: nothing is certain yet, or it was over already (a stop string was found while the engine went on)"""
        if self.finish_reason is not None:
            return None
        text = ""
        if token >= 0:
            self.tokens.append(token)
            if finish != "stop":             # the end token isn't text
                if self._keep_logprobs:
                    self._waiting.append(TokenLogprob(token, logprob, list(likeliest), self._detokenizer.length))
                text = self._detokenizer.add(token)
        if finish:
            text += self._detokenizer.finish()
        text, stopped = self._stops.add(text)
        if stopped:
            finish, error = "stop", ""
        elif finish:
            text += self._stops.finish()
        self.text += text
        if finish:
            self.finish_reason, self.error = finish, error
        decided = self._decided(bool(finish), stopped)
        return Piece(text, decided, finish or None) if text or decided or finish else None

    def _decided(self, over, stopped):
        if over and not stopped:
            count = len(self._waiting)
        else:
            count = next((i for i, entry in enumerate(self._waiting) if entry.offset >= len(self.text)), len(self._waiting))
        decided, self._waiting = self._waiting[:count], [] if over else self._waiting[count:]
        self.logprobs += decided
        return decided
