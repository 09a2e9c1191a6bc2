"""Every test, one suite after the other; a failure in one doesn't stop the next. Ends with the totals, and fails if anything failed.

    python tests/run_all.py [--build DIR] [--no-conformance]
"""
import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree

from conformance import run_suite

ROOT = pathlib.Path(__file__).resolve().parents[1]


def junit_totals(path):
    """(passed, failed, skipped) of a JUnit file; (0, 1, 0) where the runner left none."""
    try:
        suites = list(ElementTree.parse(path).iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return 0, 1, 0

    def total(*names):
        return sum(int(suite.get(name) or 0) for suite in suites for name in names)

    skipped, failed = total("skipped", "disabled"), total("failures", "errors")
    return total("tests") - skipped - failed, failed, skipped


def run(title, command, report, **kwargs):
    print(f"\n== {title}: {' '.join(command)}", flush=True)
    code = subprocess.run(command, **kwargs).returncode
    passed, failed, skipped = junit_totals(report)
    return passed, failed or (1 if code else 0), skipped


def cpp_tests(build, folder):
    report = folder / "ctest.xml"
    jobs = str(os.cpu_count() or 1)
    return run("C++", ["ctest", "--test-dir", str(build), "--output-on-failure", "--no-tests=error", "--progress", "-j", jobs,
                       "--output-junit", str(report)], report)


def python_tests(folder):
    report = folder / "pytest.xml"
    return run("Python", [sys.executable, "-m", "pytest", "-q", "-rs", f"--junitxml={report}", "tests"], report, cwd=ROOT)


def conformance_tests():
    print("\n== conformance with DeepSpeed 0.19.8", flush=True)
    result = run_suite()
    if result is None:
        print("  not run: the suite is not beside this repository")
        return 0, 0, 0
    passed, failed, waiting = result
    return passed, failed, len(waiting)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--no-conformance", action="store_true")
    options = parser.parse_args()
    totals = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        suites = {"C++": lambda: cpp_tests(options.build, folder), "Python": lambda: python_tests(folder)}
        if not options.no_conformance:
            suites["conformance"] = conformance_tests
        for title, suite in suites.items():
            begin = time.monotonic()
            totals[title] = (*suite(), time.monotonic() - begin)
    print("\n== totals")
    for title, (passed, failed, skipped, seconds) in totals.items():
        print(f"{title:12} {passed:5} passed {failed:4} failed {skipped:4} skipped or waiting   {seconds:5.0f} s")
    passed, failed, skipped = (sum(row[i] for row in totals.values()) for i in range(3))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
