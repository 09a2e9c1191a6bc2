"""The command line."""
import argparse
import os
import re

from unshard.bench_comm.operations import OPERATIONS

DTYPES = ("float32", "bfloat16", "float16")
LARGEST = 1 << 50
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def parse_size(text):
    """'64K' -> 65536"""
    match = re.fullmatch(r"(\d{1,30})\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match or int(match.group(1)) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size; write bytes, or a number with K, M or G")
    size = int(match.group(1)) << _UNITS[match.group(2).upper()]
    if size > LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is more than any memory holds ({LARGEST >> 30}G)")
    return size


def parse_operations(text):
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"'{unknown[0] if unknown else text}' is none of {', '.join(OPERATIONS)}")
    return list(dict.fromkeys(names))


def parse_iterations(text):
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is neither auto nor a number of at least 1")
    return int(text)


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 1")
    return int(text)


def build_parser(prog):
    parser = argparse.ArgumentParser(
        prog=prog, description="Measure the engine's collectives between ranks, and check every result against its exact value. "
        "Under a launcher it measures between that launcher's ranks; without one it starts ranks on this host.")
    parser.add_argument("--ranks", type=positive, metavar="N", help="ranks to start here (default: one a GPU, or 2)")
    parser.add_argument("--ops", type=parse_operations, default=list(OPERATIONS), metavar="LIST",
                        help=f"some of {','.join(OPERATIONS)} (default: all)")
    parser.add_argument("--min", "--minbytes", type=parse_size, default=1 << 10, metavar="SIZE",
                        help="smallest size in bytes (default: 1K)")
    parser.add_argument("--max", "--maxbytes", type=parse_size, default=64 << 20, metavar="SIZE", help="largest size (default: 64M)")
    parser.add_argument("--factor", type=positive, default=4, metavar="F", help="from one size to the next (default: 4)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--iters", type=parse_iterations, default=None, metavar="N|auto",
                        help="timed calls a row (default: auto, about 0.2 s)")
    parser.add_argument("--backend", choices=("auto", "shared", "c10d"), default="auto",
                        help="shared: shared memory or nothing; c10d: Gloo or NCCL even on one host (default: what training would use)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="where the tensors are (default: GPUs where there are any)")
    parser.add_argument("--json", metavar="FILE", help="rank 0 writes all figures there too")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)     # some launchers put it in front
    return parser


def parse(argv, prog):
    parser = build_parser(prog)
    options = parser.parse_args(argv)
    if options.max < options.min:
        parser.error(f"--max={options.max} is less than --min={options.min}")
    if options.factor < 2 and options.max > options.min:
        parser.error(f"--factor={options.factor} never gets from --min to --max; give at least 2")
    if options.json and not os.path.isdir(os.path.dirname(options.json) or "."):
        parser.error(f"--json={options.json}: there is no folder {os.path.dirname(options.json)}")
    return options


def sizes(options):
    found, size = [], options.min
    while size <= options.max:
        found.append(size)
        size *= max(2, options.factor)
    return found
