"""`unshard timeline DIR`."""
import argparse
import sys

from unshard.streams import command
from unshard.timeline.files import TimelineError
from unshard.timeline.merge import write_outputs


@command("unshard timeline")
def main(argv):
    parser = argparse.ArgumentParser(prog="unshard timeline", description="Merge what the ranks of a run recorded: DIR/trace.json for "
                                     "Perfetto (ui.perfetto.dev) or chrome://tracing, and DIR/timeline.html for any browser.")
    parser.add_argument("folder", metavar="DIR", help="with the timeline.rank<N>.json of a run; of all hosts, copied together")
    left_out = []
    try:
        for path in write_outputs(parser.parse_args(argv).folder, left_out=left_out):
            print(path)
    except (TimelineError, OSError) as error:
        print(f"unshard timeline: {error}", file=sys.stderr)
        return 1
    for problem in left_out:
        print(f"unshard timeline: left out: {problem}", file=sys.stderr)
    return 1 if left_out else 0
