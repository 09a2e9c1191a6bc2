"""`unshard checkpoint inspect|verify|consolidate|convert DIR`."""
import argparse
import json
import os
import sys
import time

from unshard.checkpoint.consolidate import convert_zero_checkpoint_to_fp32_state_dict
from unshard.checkpoint.hf import export_hf
from unshard.checkpoint.opening import find_folder, open_folder, tags_of
from unshard.checkpoint.progress import Progress, amount
from unshard.checkpoint.universal import export_universal
from unshard.core import CheckpointError


def main(argv=None):
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (CheckpointError, ValueError, OSError) as error:
        if arguments.debug:
            raise
        print(f"unshard: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("unshard: interrupted; nothing was left half written", file=sys.stderr)
    return 1


def _parser():
    parser = argparse.ArgumentParser(prog="unshard checkpoint", description="Look at checkpoints, check them, make others of them.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, run, help):
        added = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        added.add_argument("directory", metavar="DIR", help="a folder of checkpoints (`latest` is taken), or a tag's own; unshard's, "
                           "DeepSpeed's (universal too) or Hugging Face's")
        added.add_argument("-t", "--tag", help="the checkpoint in DIR (default: what `latest` says)")
        added.add_argument("-d", "--debug", action="store_true", help="show the whole trace of an error")
        added.set_defaults(run=run)
        return added

    inspect = command("inspect", _inspect, "show what a checkpoint holds")
    inspect.add_argument("--parameters", action="store_true", help="list them")
    inspect.add_argument("--json", action="store_true", help="for programs: everything, as JSON")
    command("verify", _verify, "read everything and compare checksums")
    consolidate = command("consolidate", _consolidate, "write the weights as one fp32 state dict")
    consolidate.add_argument("output", metavar="OUT", help="a folder")
    consolidate.add_argument("--safe_serialization", action="store_true", help="model.safetensors; default pytorch_model.bin")
    consolidate.add_argument("--max_shard_size", default="5GB", help="of one file (default 5GB)")
    consolidate.add_argument("--exclude_frozen_parameters", action="store_true", help="leave them out")
    convert = command("convert", _convert, "write it in another format")
    convert.add_argument("output", metavar="OUT", help="a folder; for universal the tag's own, e.g. checkpoints/global_step10_universal")
    convert.add_argument("--to", choices=("universal", "hf"), required=True,
                         help="universal: what DeepSpeed loads with checkpoint.load_universal; hf: model.safetensors for from_pretrained")
    convert.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="hf: of the weights (default: what they were trained in)")
    convert.add_argument("--config-from", metavar="MODEL",
                         help="hf: copy this folder's config and tokenizer: all but weights and a run's files")
    convert.add_argument("--max_shard_size", default="5GB", help="hf: of one file (default 5GB)")
    return parser


def _open(arguments):
    return open_folder(find_folder(arguments.directory, arguments.tag))


def _inspect(arguments):
    source = _open(arguments)
    if arguments.json:
        print(json.dumps({"folder": source.origin, "writer": source.writer, **source.contents}, indent=1))
        return 0
    rows = _summary(source, arguments.directory)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    if arguments.parameters:
        print()
        _print_table([("parameter", "shape", "dtype", "group", "steps", "values"), *map(_parameter_row, source.contents["parameters"])])
    return 0


def _summary(source, directory):
    contents = source.contents
    counters, optimizer = contents["counters"], contents["optimizer"]
    present = [contents_of for contents_of in contents["parameters"] if contents_of["kinds"]]
    trained = [parameter["name"] for parameter in present if parameter["group"] >= 0]
    count = {True: 0, False: 0}
    for parameter in present:
        count[parameter["group"] >= 0] += source.numel(parameter["name"])
    dtypes = sorted({parameter["dtype"] for parameter in present})
    state = source.python_state()
    files = source.files()
    rows = [("folder", source.origin), ("format", source.writer)]
    others = [tag for tag in tags_of(directory) if tag != contents["tag"]]
    if others:
        rows.append(("tags beside it", ", ".join(others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")))
    frozen = f"; {len(present) - len(trained)} of them frozen ({amount(count[False], '')} elements)" if count[False] and trained else ""
    rows.append(("parameters", f"{amount(count[True] + count[False], '')} elements in {_number(len(present), 'tensor')}, computed in "
                 f"{', '.join(dtypes) or '?'}{frozen}"))
    if source.shared:
        rows.append(("tied", ", ".join(f"{alias} = {name}" for alias, name in list(source.shared.items())[:4])))
    if trained or counters["global_steps"]:
        rows += [("ranks, stage", f"{_number(contents['world_size'], 'rank')}, ZeRO stage {contents['stage']} (loads at any)"),
                 ("steps", f"{counters['global_steps']} ({counters['skipped_steps']} skipped), {counters['global_samples']} samples"),
                 ("optimizer", _optimizer_text(source, optimizer))]
    if "loss_scaler" in contents:
        rows.append(("loss scale", f"{contents['loss_scaler']['scale']:g}"))
    if state.get("lr_scheduler"):
        rows.append(("schedule", ", ".join(f"{key} {value}" for key, value in list(state["lr_scheduler"].items())[:4])))
    if state.get("client_state"):
        rows.append(("client_state", ", ".join(map(str, state["client_state"]))))
    for place, name in state.get("left_out", {}).items():
        rows.append(("can't be read", f"client_state{place} is a {name}: left out"))
    rows.append(("on disk", f"{amount(sum(map(os.path.getsize, files)))} in {_number(len(files), 'file')}"))
    return rows


def _number(count, what):
    return f"{count} {what}{'' if count == 1 else 's'}"


def _optimizer_text(source, optimizer):
    why = getattr(source, "without_optimizer", None)
    if why:
        return f"{optimizer['type'] or '?'}; {why}"
    rates = ", ".join(dict.fromkeys(f"{group['lr']:g}" for group in source.contents["groups"] if "lr" in group))
    return (f"{optimizer['type'] or 'one of the user'} with {', '.join(optimizer['states']) or 'no states'}"
            + (f"; lr {rates}" if rates else ""))


def _parameter_row(parameter):
    shape = "x".join(map(str, parameter["shape"])) or "scalar"
    group = "frozen" if parameter["group"] < 0 else str(parameter["group"])
    return parameter["name"], shape, parameter["dtype"], group, str(parameter["steps"]), ", ".join(parameter["kinds"]) or "left out"


def _print_table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip())


def _verify(arguments):
    source = _open(arguments)
    start = time.monotonic()
    with Progress("verify") as progress:
        source.verify(progress)
        source.python_state()
    files = source.files()
    size = sum(map(os.path.getsize, files))
    seconds = max(time.monotonic() - start, 1e-3)
    print(f"{source.origin}: {_number(len(files), 'file')}, {amount(size)}, all as written ({amount(size / seconds)}/s)")
    return 0


def _consolidate(arguments):
    with Progress("consolidate") as progress:
        files = convert_zero_checkpoint_to_fp32_state_dict(
            arguments.directory, arguments.output, arguments.max_shard_size, arguments.safe_serialization, arguments.tag,
            arguments.exclude_frozen_parameters, progress)
    return _say_written(arguments.output, files)


def _convert(arguments):
    source = _open(arguments)
    if arguments.to == "universal":
        for option in ("dtype", "config_from"):
            if getattr(arguments, option):
                raise ValueError(f"--{option.replace('_', '-')} is for --to hf")
        with Progress("convert") as progress:
            export_universal(source, arguments.output, progress=progress)
        print(f"{arguments.output}: {len(source.names())} parameters in DeepSpeed's universal layout; load it there with "
              '"checkpoint": {"load_universal": true}')
        return 0
    with Progress("convert") as progress:
        files = export_hf(source, arguments.output, arguments.dtype, arguments.max_shard_size, arguments.config_from, progress)
    return _say_written(arguments.output, files)


def _say_written(output, files):
    size = sum(os.path.getsize(os.path.join(output, name)) for name in files)
    listed = ", ".join(files) if len(files) <= 4 else f"{files[0]} ... {files[-1]} ({len(files)} files)"
    print(f"{output}: {listed}, {amount(size)}")
    return 0
