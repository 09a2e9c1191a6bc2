"""The Python example of README.md runs as it stands, on two ranks."""
import os
import pathlib
import re
import subprocess
import sys

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


def test_the_python_example_runs(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "unshard.launcher", "--num_gpus=2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([2048, 512])") == 2
