"""`unshard report`: what runs here, on what, over which links, and what is wrong with it.

    unshard report [--json] [--ranks N]

Facts come from a Machine (files below one root, the environment, a few functions); findings are functions of the facts.
"""
import argparse
import dataclasses
import json

from unshard.report.facts import collect
from unshard.report.findings import Finding, findings
from unshard.report.machine import Machine
from unshard.report.show import show
from unshard.streams import command

__all__ = ["Finding", "Machine", "collect", "findings", "main", "show"]


@command("unshard report")
def main(argv=None, prog="unshard report"):
    """Print the report. Returns 0: what is wrong is said, not judged."""
    parser = argparse.ArgumentParser(prog=prog, description="Show versions, processor, memory, GPUs and links, which interfaces Gloo and "
                                     "NCCL will use, and what is wrong with any of it.")
    parser.add_argument("--json", action="store_true", help="print all facts and findings as JSON")
    parser.add_argument("--ranks", type=int, default=None, metavar="N",
                        help="ranks that will run on this host (default: the launcher's word, or 1)")
    options = parser.parse_args(argv)
    if options.ranks is not None and options.ranks < 1:
        parser.error(f"--ranks={options.ranks}: at least 1 is needed")
    facts = collect(Machine(), options.ranks)
    found = findings(facts)
    if options.json:
        print(json.dumps({**facts, "findings": [dataclasses.asdict(one) for one in found]}, indent=1))
    else:
        print(show(facts, found))
    return 0
