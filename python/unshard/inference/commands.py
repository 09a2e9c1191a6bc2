"""`unshard serve MODEL` and `unshard generate MODEL PROMPT`."""
import argparse
import os
import sys
import time

from unshard.inference.generation_config import sampling_defaults
from unshard.inference.model import open_model
from unshard.inference.sizes import parse_bytes
from unshard.inference.tokenizer_files import model_path
from unshard.streams import command

_SERVER_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


def _engine_options(parser):
    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16", "int8", "int4", "w8a8"),
                       help="of the weights; int8 and int4: weights only, w8a8: activations too (default auto: as the file has them)")
    group.add_argument("--kv-dtype", choices=("auto", "fp32", "bf16", "int8"),
                       help="of the KV cache (default auto: bf16, or fp32 beside fp32)")
    group.add_argument("--threads", type=_positive, metavar="N", help="that compute, of a rank (default: the cores, shared out)")
    group.add_argument("--step-tokens", type=_positive, metavar="N", help="that one step computes at most (default 40 a thread)")
    group.add_argument("--kv-cache-tokens", type=_positive, metavar="N", help="that the KV cache holds (default: as many as fit in 1 GiB)")
    group.add_argument("--max-sequences", type=_positive, metavar="N", help="that are computed at once (default 256)")
    group.add_argument("--max-waiting", type=_positive, metavar="N", help="requests that may wait; more get a 429 (default 1024)")
    group.add_argument("--max-context", type=_positive, metavar="N", help="tokens of prompt and output together (default: the model's own)")
    group.add_argument("--weight-memory", type=_memory, metavar="SIZE",
                       help="that weights may take, such as 2G; those beyond it are read from disk in each step (default: all in memory)")
    group.add_argument("--weight-cache", metavar="FOLDER",
                       help="with --weight-memory: where the packed weights are put to be read from, on a fast disk (default "
                       "~/.cache/unshard/weights)")
    group.add_argument("--tp", dest="tensor_parallel", type=_positive, metavar="N",
                       help="ranks that compute the model together, each with a part of every matrix (default 1)")
    group.add_argument("--replicas", type=_positive, metavar="N",
                       help="times that the model is held, each with weights, cache and threads of its own, behind one port (default 1)")
    group.add_argument("--no-share-prefixes", dest="share_prefixes", action="store_false", default=None,
                       help="compute equal beginnings of prompts each time")
    group.add_argument("--speculate", metavar="ngram|MODEL",
                       help="guess next tokens, which one step then checks together; the output stays the same. ngram: what followed "
                       "earlier in the text; else a smaller model of the same vocabulary (default: no guesses)")
    group.add_argument("--guesses", type=_positive, metavar="K",
                       help="of a sequence in a step, at most; fewer where they don't pay (default 8)")
    group.add_argument("--always-guess", action="store_true", default=None, help="K guesses even where they don't pay")


_ENGINE = ("tensor_parallel", "replicas", "dtype", "kv_dtype", "threads", "step_tokens", "kv_cache_tokens", "max_sequences", "max_waiting",
           "max_context", "share_prefixes", "speculate", "guesses", "always_guess", "weight_memory", "weight_cache")


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return value


def _memory(text):
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text):
    value = float(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text}: 0 seconds or more")
    return value


def _port(text):
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{text}: 0 to 65535")
    return value


def _opened(options):
    given = {name: getattr(options, name) for name in _ENGINE if getattr(options, name) is not None}
    return open_model(options.model, **given)


def _complain(error):
    print(f"unshard: {' '.join(str(error).split())}", file=sys.stderr)
    return 1


def _parser(name, description):
    parser = argparse.ArgumentParser(prog=f"unshard {name}", description=description)
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder (config.json, safetensors, tokenizer) or a GGUF file")
    return parser


def serve_parser():
    parser = _parser("serve", "Serve a model over HTTP, as OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models; /health, "
                     "/metrics, and a page at / to look at it and try a prompt.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default 127.0.0.1: this machine only)")
    parser.add_argument("--port", type=_port, default=8000, help="default 8000; 0: a free one")
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get("UNSHARD_API_KEY"),
                        help="that requests to /v1 must bring, as Authorization: Bearer KEY (default: the variable UNSHARD_API_KEY)")
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call the model (default: the name of its folder or file)")
    parser.add_argument("--generation-config", choices=("auto", "none"), default="auto",
                        help="auto: temperature, top_p, top_k, min_p and repetition_penalty of the model's generation_config.json are what "
                             "requests have that don't say them; none: OpenAI's defaults (default auto)")
    parser.add_argument("--drain-timeout", type=_seconds, default=30.0, metavar="S",
                        help="seconds that running requests have to finish after SIGTERM (default 30)")
    _engine_options(parser)
    return parser


@command("unshard serve")
def serve(argv):
    options = serve_parser().parse_args(argv)
    try:
        from unshard.inference.server.app import create_app
        from unshard.inference.server.run import serve as run
    except ImportError as error:
        return _complain(f"serving needs a package that is missing: {error}; pip install {' '.join(_SERVER_PACKAGES)}")
    try:
        began = time.perf_counter()
        sampling = sampling_defaults(model_path(options.model)) if options.generation_config == "auto" else {}
        model = _opened(options)
        app = create_app(model, name=options.served_model_name, api_key=options.api_key, sampling=sampling)

        def ready(port):
            host = f"[{options.host}]" if ":" in options.host else options.host
            print(f"{app.state.service.name} is served on http://{host}:{port} ({time.perf_counter() - began:.1f} s; "
                  f"{_facts(model, sampling)})", flush=True)
            if model.info.get("weights_from_disk"):
                print(model.info["weights_from_disk"], flush=True)
        run(app, host=options.host, port=options.port, drain_timeout_s=options.drain_timeout, ready=ready)
    except (RuntimeError, ValueError, OSError) as error:
        return _complain(error)
    return 0


def _facts(model, sampling):
    info = model.info
    facts = [info["family"], f"{info['parameters'] / 1e6:.0f} M parameters", info["dtype"], f"context {model.context}"]
    if len(model.engines) > 1:
        facts.append(f"{len(model.engines)} replicas")
    if sampling:
        facts.append(f"generation_config.json: {' '.join(f'{name} {value:g}' for name, value in sampling.items())}")
    return ", ".join(facts)


def generate_parser():
    parser = _parser("generate", "Continue a prompt, or answer it with --chat. The text goes to standard output as it comes, its speed to "
                     "standard error.")
    parser.add_argument("prompt", metavar="PROMPT", help="text; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: use the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before it")
    parser.add_argument("--max-tokens", type=_positive, default=256, metavar="N", help="default 256")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: always the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the output; may be given again")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    _engine_options(parser)
    return parser


_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos")


@command("unshard generate")
def generate(argv):
    options = generate_parser().parse_args(argv)
    try:
        from unshard.inference.llm import LLM
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        with LLM.of(_opened(options)) as llm:
            return _show(llm, _prompt(llm, prompt, options), {name: getattr(options, name) for name in _SAMPLING})
    except KeyboardInterrupt:
        print("\nunshard: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        return _complain(error)


def _prompt(llm, prompt, options):
    if not options.chat:
        return llm.tokenizer.encode(prompt)
    system = [{"role": "system", "content": options.system}] if options.system else []
    return llm.tokenizer.chat([*system, {"role": "user", "content": prompt}])


def _show(llm, prompt, sampling):
    began, before = time.perf_counter(), llm.stats()
    first = None
    for piece in llm.stream(prompt, **sampling):
        first = first or time.perf_counter()
        print(piece.text, end="", flush=True)
    print(flush=True)
    end = time.perf_counter()
    made, guessed, right = (llm.stats()[name] - before[name] for name in ("generated_tokens", "guessed", "accepted"))
    rate = f", then {(made - 1) / (end - first):.1f} tokens/s" if made > 1 and end > first else ""
    guesses = f"; {right} of {guessed} guesses right" if guessed else ""
    print(f"[{len(prompt)} prompt tokens; first text after {(first or end) - began:.2f} s{rate}; {made} tokens{guesses}]", file=sys.stderr)
    return 0
