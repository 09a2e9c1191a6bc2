"""Log-probabilities in the shapes of OpenAI's two endpoints."""
import math


def of_completion(tokenizer, entries, shift=0):
    """shift: characters before the output (an echoed prompt). A log-probability of None: of a prompt's first token."""
    names = [_name(tokenizer.token_bytes(entry.token)) for entry in entries]
    likeliest = []
    for entry in entries:
        if entry.logprob is None:
            likeliest.append(None)
            continue
        found = {}
        for token, logprob in [*entry.likeliest, (entry.token, entry.logprob)]:
            found.setdefault(_name(tokenizer.token_bytes(token)), _finite(logprob))
        likeliest.append(found)
    return {"tokens": names, "token_logprobs": [_finite(entry.logprob) for entry in entries], "top_logprobs": likeliest,
            "text_offset": [entry.offset + shift for entry in entries]}


def of_chat(tokenizer, entries):
    def described(token, logprob):
        data = tokenizer.token_bytes(token)
        return {"token": _name(data), "logprob": _finite(logprob), "bytes": list(data)}
    return {"content": [{**described(entry.token, entry.logprob), "top_logprobs": [described(*pair) for pair in entry.likeliest]}
                        for entry in entries], "refusal": None}


def _name(data):
    """A part of a character is written as OpenAI does: bytes:\\xe2\\x82."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob):
    return logprob if logprob is None or math.isfinite(logprob) else -9999.0       # JSON has no infinity
