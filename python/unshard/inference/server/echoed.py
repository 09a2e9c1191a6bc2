"""Log-probabilities of a prompt's own tokens: what /v1/completions gives with echo and logprobs, and evaluations are made of."""
import asyncio

from unshard.inference.detokenizer import Detokenizer
from unshard.inference.server.errors import ApiError, bad_request
from unshard.inference.text_output import TokenLogprob

_MOST_BYTES = 256 << 20         # of one prompt's logits, which are held about three times; others wait while it is computed


async def scored(service, prompts, likeliest):
    """Of each prompt (tokens) a TokenLogprob for each token; the first has none (None), since nothing stands before it. One request after
    the other: a prompt is computed at once, and those that generate wait meanwhile. Raises ApiError."""
    most = _MOST_BYTES // (4 * service.model.info["vocab"])
    if longest := max((len(prompt) for prompt in prompts if len(prompt) > most), default=0):
        raise bad_request(f"echo: log-probabilities of a prompt are given for up to {most} tokens, and it has {longest}; leave echo or "
                          "logprobs out", "echo", "invalid_value")
    try:
        async with service.scoring:
            return [await asyncio.to_thread(_of_prompt, service, prompt, likeliest) for prompt in prompts]
    except RuntimeError as error:
        raise ApiError(503, f"the engine failed: {error}", type="unavailable", code="engine_failed") from error


def _of_prompt(service, prompt, likeliest):
    import numpy
    rows = numpy.frombuffer(service.dispatcher.logits(prompt), numpy.float32).reshape(len(prompt), -1)
    text = Detokenizer(service.model.tokenizer, skip_special=False)
    entries = []
    for at, token in enumerate(prompt):
        entry = TokenLogprob(token, None, [], text.length)
        if at > 0:
            row = rows[at - 1].astype(numpy.float64)
            row -= row.max()
            row -= numpy.log(numpy.exp(row).sum())
            best = numpy.argpartition(row, -likeliest)[-likeliest:] if likeliest else []
            entry.logprob = float(row[token])
            entry.likeliest = sorted(((int(i), float(row[i])) for i in best), key=lambda pair: (-pair[1], pair[0]))
        text.add(token)
        entries.append(entry)
    return entries
