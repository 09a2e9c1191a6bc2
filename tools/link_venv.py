"""Make a virtual environment see the build: `import unshard`, `import deepspeed`, and the commands unshard, deepspeed, ds, deepspeed.pt,
ds_report, dsr, ds_ssh, ds_bench.

    PYTHON_OF_THE_ENVIRONMENT tools/link_venv.py PACKAGES_DIR
"""
import pathlib
import re
import shutil
import sys
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMANDS = {"unshard": "unshard.cli", "deepspeed": "deepspeed.launcher.runner", "ds": "deepspeed.launcher.runner",
            "deepspeed.pt": "deepspeed.launcher.runner", "ds_report": "deepspeed.env_report", "dsr": "deepspeed.env_report",
            "ds_ssh": "deepspeed.launcher.ds_ssh", "ds_bench": "deepspeed.launcher.ds_bench"}
PROJECTS = {"unshard": ROOT / "pyproject.toml", "deepspeed": ROOT / "python" / "deepspeed" / "pyproject.toml"}

SCRIPT = """#!{python}
import sys

from {module} import main

if __name__ == "__main__":
    sys.exit(main())
"""


def main(packages):
    packages = pathlib.Path(packages).resolve()
    if not (packages / "unshard").is_dir():
        sys.exit(f"{packages} holds no package: configure the build with -DUNSHARD_BUILD_PYTHON=ON (make clean, then make build)")
    if (environment := pathlib.Path(sys.executable).parents[1]).is_symlink():
        sys.exit(f"{environment} is a link: another checkout uses that environment, and would use this build from now on; remove the link "
                 "and let `make setup` make one here")
    site = pathlib.Path(sysconfig.get_paths()["purelib"])
    (site / "unshard-build.pth").write_text(f"{packages}\n")
    for name, module in COMMANDS.items():
        script = pathlib.Path(sysconfig.get_paths()["scripts"]) / name
        script.write_text(SCRIPT.format(python=sys.executable, module=module))
        script.chmod(0o755)
    for name, project in PROJECTS.items():
        describe(site, name, re.search(r'^version = "([^"]+)"', project.read_text(), re.M).group(1))


def describe(site, name, version):
    """What pip would write; transformers and accelerate look the distributions up by name."""
    for old in site.glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("make\n")
    (info / "RECORD").write_text("")


if __name__ == "__main__":
    main(sys.argv[1])
