"""The command `unshard`: `run` starts ranks, `timeline` shows what they did when, `bench comm` measures between them, `report` describes
this machine, `config show` prints a resolved configuration, `checkpoint` looks at checkpoints and converts them, `serve`, `generate`
and `embed` run a trained model."""
import argparse
import sys

from unshard.streams import command


@command("unshard")
def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["run"]:
        from unshard.launcher import main as run
        return run(argv[1:])
    if argv[:2] == ["bench", "comm"]:
        from unshard.bench_comm import main as bench_comm
        return bench_comm(argv[2:])
    if argv[:1] == ["doctor"]:
        from unshard.doctor import main as doctor
        return doctor(argv[1:])
    if argv[:1] == ["timeline"]:
        from unshard.timeline import main as timeline
        return timeline(argv[1:])
    if argv[:1] == ["report"]:
        from unshard.report import main as report
        return report(argv[1:])
    if argv[:1] == ["checkpoint"]:
        from unshard.checkpoint.cli import main as checkpoint
        return checkpoint(argv[1:])
    if argv[:1] in (["serve"], ["generate"], ["embed"]):
        from unshard.inference import commands
        return getattr(commands, argv[0])(argv[1:])
    from unshard import __version__
    parser = argparse.ArgumentParser(prog="unshard", description="Train models that don't fit one device, and serve them.")
    parser.add_argument("--version", action="version", version=f"unshard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="start the ranks of a training script", add_help=False)
    bench = commands.add_parser("bench", help="measure: `unshard bench comm`").add_subparsers(dest="action", required=True)
    bench.add_parser("comm", help="speed and correctness of the collectives between ranks", add_help=False)
    commands.add_parser("doctor", help="where the ranks of a run differ or wait, from what each recorded", add_help=False)
    commands.add_parser("report", help="versions, processor, links, and what is wrong with them", add_help=False)
    commands.add_parser("timeline", help="merge what the ranks of a run recorded into one trace and one page", add_help=False)
    commands.add_parser("checkpoint", help="inspect, verify, consolidate or convert a checkpoint, unshard's or DeepSpeed's", add_help=False)
    commands.add_parser("serve", help="a trained model over HTTP, as OpenAI's API, with a page to try it", add_help=False)
    commands.add_parser("generate", help="what a trained model makes of a prompt", add_help=False)
    commands.add_parser("embed", help="vectors of texts, by an encoder", add_help=False)
    config = commands.add_parser("config", help="look at a configuration").add_subparsers(dest="action", required=True)
    show = config.add_parser("show", help="print every resolved key, its value and where that came from")
    show.add_argument("file", help="a DeepSpeed JSON")
    show.add_argument("--world-size", type=int, default=1, help="ranks that will train (for the batch sizes)")
    show.add_argument("--deepspeed-defaults", action="store_true", help="as `import deepspeed` resolves it (gradient_clipping absent: 1.0)")
    arguments = parser.parse_args(argv)
    return show_config(arguments.file, arguments.world_size, arguments.deepspeed_defaults)


def show_config(path, world_size, deepspeed_defaults):
    from unshard.config import from_file
    from unshard.core import ConfigError
    try:
        config = from_file(path, world_size, deepspeed_defaults)
    except (ConfigError, OSError) as error:
        print(f"unshard: {error}", file=sys.stderr)
        return 1
    rows = [("key", "value", "from"), *config.table()]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    for row in rows:
        print(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}")
    for notice in config.notices():
        print(f"note: {notice}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
