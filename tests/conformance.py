"""Runs DeepSpeed's conformance suite, which lies beside the repository where it is there at all, on the cases that are built.

    python tests/conformance.py [--only GLOB] [--verbose]

Prints one line a case, then the visible list of the cases that wait for what isn't built, and why.
"""
import argparse
import fnmatch
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
SUITE = ROOT.parent / "shared" / "conformance"

READY = ["seed_*", "zero_*", "bf16*", "fp16_scaler*", "accumulation*", "clipping*", "schedulers*", "optimizers*", "batch_size", "offload*",
         "tied_weights*", "reuse_and_branch*", "safe_access*", "launcher*", "checkpoint*", "consolidate*", "universal*", "frozen_lora*",
         "hf_*"]
WAITING = {
    "muon*": "the Muon optimizer",
    "moe*": "expert parallelism",
    "pipeline*": "pipeline parallelism",
}


def case_names():
    """As run.py names them: the case, or case-variant."""
    return sorted(path.stem for path in (SUITE / "expected").glob("*.json"))


def why_waiting(name):
    if any(fnmatch.fnmatch(name, glob) for glob in READY):
        return None
    return next((why for glob, why in WAITING.items() if fnmatch.fnmatch(name, glob)), "not sorted yet")


def run(python, glob, verbose):
    """Returns (passed, failed) of one call of the suite; its lines are shown as they come."""
    words = [python, str(SUITE / "run.py"), "--python", python, "--only", glob] + ["--verbose"] * verbose
    passed = failed = 0
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if re.fullmatch(r"\d+ passed, \d+ failed\n", line):
                continue                     # one total at the end instead
            print("  " + line, end="", flush=True)
            passed += line.startswith("PASS ")
            failed += line.startswith("FAIL ")
    if not passed + failed:
        print(f"  FAIL {glob}: the suite ran nothing")
        failed = 1
    return passed, failed


def run_suite(python=sys.executable, only="*", verbose=True):
    """(passed, failed, waiting names), or None where there is no suite."""
    if not (SUITE / "run.py").exists():
        return None
    waiting = [name for name in case_names() if why_waiting(name)]
    ready = [name for name in case_names() if not why_waiting(name) and fnmatch.fnmatch(name, only)]
    passed = failed = 0
    for stem in sorted({name.split("-")[0] for name in ready}):
        globs = [stem + "*"] if only == "*" and not any(name.split("-")[0] == stem for name in waiting) else \
                [name for name in ready if name.split("-")[0] == stem]
        for glob in globs:
            good, bad = run(python, glob, verbose)
            passed, failed = passed + good, failed + bad
    print(f"Waiting ({len(waiting)} cases):")
    for glob, why in WAITING.items():
        names = [name for name in waiting if why_waiting(name) == why and fnmatch.fnmatch(name, glob)]
        print(f"  {glob:16} {len(names):2}  {why}")
    for name in waiting:
        if why_waiting(name) == "not sorted yet":
            print(f"  {name}: in neither list of tests/conformance.py")
    return passed, failed, waiting


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="glob on case names, e.g. 'zero_*'")
    parser.add_argument("--verbose", action="store_true", help="show the ranks' output of failures")
    options = parser.parse_args()
    result = run_suite(sys.executable, options.only, options.verbose)
    if result is None:
        print(f"there is no conformance suite in {SUITE}")
        return 0
    print(f"{result[0]} passed, {result[1]} failed")
    return 1 if result[1] or not result[0] else 0


if __name__ == "__main__":
    sys.exit(main())
