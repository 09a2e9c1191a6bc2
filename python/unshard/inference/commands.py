"""`unshard serve MODEL`, `unshard generate MODEL PROMPT` and `unshard embed MODEL TEXT...`."""
import argparse
import contextlib
import functools
import os
import signal
import sys
import threading
import time

from unshard.inference.generation_config import sampling_defaults
from unshard.inference.model import open_model
from unshard.inference.sizes import parse_bytes
from unshard.inference.tokenizer_files import model_path
from unshard.streams import command

_SERVER_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
_DTYPES = ("auto", "fp32", "bf16", "fp16", "int8", "int4", "w8a8")


def _engine_options(parser):
    group = parser.add_argument_group("engine")
    group.add_argument("--device", metavar="DEVICE", help="that computes: cpu, cuda or cuda:N (default cpu)")
    group.add_argument("--dtype", choices=_DTYPES,
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


_ENGINE = ("tensor_parallel", "replicas", "device", "dtype", "kv_dtype", "threads", "step_tokens", "kv_cache_tokens", "max_sequences",
           "max_waiting", "max_context", "share_prefixes", "speculate", "guesses", "always_guess", "weight_memory", "weight_cache")


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


def _given(options):
    return {name: getattr(options, name) for name in _ENGINE if getattr(options, name) is not None}


def _complain(error):
    print(f"unshard: {' '.join(str(error).split())}", file=sys.stderr)
    return 1


def _one_line_errors(main):
    """What models and requests raise, and Ctrl-C, end a command with one line."""
    @functools.wraps(main)
    def careful(argv):
        try:
            return main(argv)
        except KeyboardInterrupt:
            print("\nunshard: interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:
            raise
        except (RuntimeError, ValueError, OSError) as error:
            return _complain(error)
    return careful


def _parser(name, description, model="a Hugging Face folder (config.json, safetensors, tokenizer) or a GGUF file"):
    parser = argparse.ArgumentParser(prog=f"unshard {name}", description=description)
    parser.add_argument("model", metavar="MODEL", help=model)
    return parser


def serve_parser():
    parser = _parser("serve", "Serve a model over HTTP, as OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models; /health, "
                     "/metrics, and a page at / to look at it and try a prompt. Where MODEL is an encoder: /v1/embeddings.")
    parser.add_argument("--embedding-model", metavar="PATH", help="an encoder's Hugging Face folder, for /v1/embeddings beside MODEL")
    parser.add_argument("--embedding-dtype", choices=_DTYPES, default="auto", help="of its weights (default auto: as the file has them)")
    parser.add_argument("--served-embedding-name", metavar="NAME", help="what clients call it (default: the name of its folder)")
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


@contextlib.contextmanager
def _ctrl_c_kills():
    """While models are opened, as SIGTERM does: the other ranks see it and end. A KeyboardInterrupt in the middle of an import can leave
    the interpreter's import lock held, for which the thread that loads the tokenizer then waits for ever."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@command("unshard serve")
def serve(argv):
    options = serve_parser().parse_args(argv)
    try:
        from unshard.inference.embedding_commands import open_served
        from unshard.inference.server.app import create_app
        from unshard.inference.server.run import serve as run
    except ImportError as error:
        return _complain(f"serving needs a package that is missing: {error}; pip install {' '.join(_SERVER_PACKAGES)}")
    try:
        began = time.perf_counter()
        with _ctrl_c_kills():
            model, embedder = open_served(options, _given(options))
        wanted = model and options.generation_config == "auto"
        sampling = sampling_defaults(model_path(options.model)) if wanted else {}
        app = create_app(model, name=options.served_model_name, api_key=options.api_key, sampling=sampling, embedder=embedder,
                         embedding_name=options.served_embedding_name, max_waiting_embeddings=options.max_waiting or 1024)

        def ready(port):
            host = f"[{options.host}]" if ":" in options.host else options.host
            print(f"{app.state.service.name} is served on http://{host}:{port} ({time.perf_counter() - began:.1f} s; "
                  f"{'; '.join(_facts(each) for each in (model, embedder) if each)}{_defaults(sampling)})", flush=True)
            if model and model.info.get("weights_from_disk"):
                print(model.info["weights_from_disk"], flush=True)
        run(app, host=options.host, port=options.port, drain_timeout_s=options.drain_timeout, ready=ready)
    except (RuntimeError, ValueError, OSError) as error:
        return _complain(error)
    return 0


def _facts(model):
    info, replicas = model.info, len(getattr(model, "engines", ()))
    facts = [info["family"], f"{info['parameters'] / 1e6:.0f} M parameters", info["dtype"], f"context {model.context}"]
    return ", ".join(facts + ([f"{replicas} replicas"] if replicas > 1 else []))


def _defaults(sampling):
    return f"; generation_config.json: {' '.join(f'{name} {value:g}' for name, value in sampling.items())}" if sampling else ""


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
@_one_line_errors
def generate(argv):
    options = generate_parser().parse_args(argv)
    from unshard.inference.embedder import makes_embeddings
    from unshard.inference.llm import LLM
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with _ctrl_c_kills():
        if makes_embeddings(options.model):
            return _complain(f"{options.model} is an encoder, which makes embeddings and no text: unshard embed {options.model} TEXT")
        model = open_model(options.model, **_given(options))
    with LLM.of(model) as llm:
        return _show(llm, _prompt(llm, prompt, options), {name: getattr(options, name) for name in _SAMPLING})


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


def embed_parser():
    parser = _parser("embed", "Vectors of texts, by an encoder: one a line, as a JSON list. Their speed goes to standard error.",
                     model="the Hugging Face folder of an encoder (BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT)")
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="- reads standard input, one text a line")
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long, instead of refusing them")
    parser.add_argument("--dtype", choices=_DTYPES, default="auto", help="of the weights (default auto: as the file has them)")
    parser.add_argument("--threads", type=_positive, metavar="N", default=0, help="that compute (default: the processor's cores)")
    parser.add_argument("--max-context", type=_positive, metavar="N", default=0, help="tokens of a text at most (default: the model's own)")
    return parser


@command("unshard embed")
@_one_line_errors
def embed(argv):
    options = embed_parser().parse_args(argv)
    from unshard.inference.embedder import Embedder
    from unshard.inference.embedding_commands import show
    with Embedder(options.model, dtype=options.dtype, threads=options.threads, max_context=options.max_context) as embedder:
        show(embedder, options.texts, options.truncate)
    return 0
