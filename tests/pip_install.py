"""`pip install --no-build-isolation .` as a newcomer does it: a wheel is built from a copy of the sources, installed where only torch is,
and trains; and no path of the building machine is left in it.

    python tests/pip_install.py          (minutes: it compiles the library; `make soak` runs it)
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = """
import deepspeed, torch, unshard
model = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 3}})
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
print("installed at", unshard.__file__, "step", engine.global_steps)
"""


def run(*words, **options):
    print("$", *words, flush=True)
    return subprocess.run([str(word) for word in words], check=True, timeout=1800, **options)


def check_wheel(wheel, folder):
    """Shared objects find torch through the interpreter, never by an absolute path."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(folder)
    assert libraries, f"{wheel.name} holds no compiled module"
    for name in libraries:
        dynamic = run("readelf", "-d", folder / name, capture_output=True, text=True).stdout
        paths = re.findall(r"R(?:UN)?PATH.*\[(.*)\]", dynamic)
        absolute = [part for path in paths for part in path.split(":") if part and not part.startswith("$ORIGIN")]
        assert not absolute, f"{name} in {wheel.name} looks for libraries in {absolute}"


def main():
    work = pathlib.Path(tempfile.mkdtemp(prefix="unshard_pip_"))
    try:
        run("git", "clone", "-q", ROOT, work / "source")
        for project in (work / "source", work / "source" / "python" / "deepspeed"):
            run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", work / "wheels", project)
        wheels = sorted((work / "wheels").glob("*.whl"))
        assert len(wheels) == 2, wheels
        check_wheel(next(wheel for wheel in wheels if wheel.name.startswith("unshard")), work / "unpacked")
        # Beside the torch of this interpreter, and away from the sources that its environment links to (-I leaves out .pth files' effect
        # only partly, so the new folder simply goes first).
        run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", work / "site", *wheels)
        (work / "train.py").write_text(f"import sys; sys.path.insert(0, {str(work / 'site')!r})\n{SCRIPT}")
        said = run(sys.executable, work / "train.py", capture_output=True, text=True).stdout
        print(said, end="")
        assert f"installed at {work / 'site'}" in said and "step 1" in said
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("pip install: passed")


if __name__ == "__main__":
    main()
