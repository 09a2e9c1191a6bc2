"""The command line."""
import argparse
import json
import os

from unshard.doctor import processes
from unshard.doctor.diagnose import diagnose
from unshard.doctor.load import load_files, load_folders
from unshard.doctor.words import describe
from unshard.streams import command


@command("unshard doctor")
def main(argv=None, prog="unshard doctor"):
    """Print the diagnosis. Returns 0 when nothing is wrong, 1 when something is, 2 when there is nothing to look at."""
    parser = argparse.ArgumentParser(prog=prog, description="Say where the ranks of a run differ or wait, from what each of them recorded.")
    parser.add_argument("where", nargs="+", metavar="RUN_DIR|PID",
                        help="the run's folder (several, if each host has its own), or the process id of a launcher or a rank on this host")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.add_argument("--wait", type=float, default=5, metavar="S", help="seconds that ranks have to answer, with a PID (default: 5)")
    options = parser.parse_args(argv)
    try:
        if len(options.where) == 1 and options.where[0].isdigit() and not os.path.isdir(options.where[0]):
            files, notes = processes.ask(int(options.where[0]), options.wait)
            records = load_files(files, notes)
            processes.clean(files)
        else:
            records = load_folders(options.where)
    except OSError as error:
        print(f"{prog}: {error.filename or options.where[0]}: {(error.strerror or str(error)).lower()}; give the folder of --run-dir "
              "(UNSHARD_RUN_DIR), or a process id")
        return 2
    except processes.NoRanks as error:
        print(f"{prog}: {error}")
        return 2
    found = diagnose(records)
    print(json.dumps(found, indent=1) if options.json else describe(found))
    if not found["ranks"]:
        return 2
    return 0 if found["healthy"] else 1
