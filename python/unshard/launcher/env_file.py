"""`.deepspeed_env`: KEY=VALUE lines that every rank gets in its environment."""
import os

from unshard.launcher.errors import LaunchError


def read_env_files():
    """From the home folder, then the working folder (which wins); DS_ENV_FILE sets another name, or the path of the one file."""
    asked = os.environ.get("DS_ENV_FILE", "")
    name = asked or ".deepspeed_env"
    paths = [name] if os.path.isfile(name) and os.sep in name else [os.path.join(folder, name) for folder in (os.path.expanduser("~"), ".")]
    found = {}
    if asked and not any(map(os.path.isfile, paths)):
        raise LaunchError(f"DS_ENV_FILE={asked}: there is no such file")
    for path in paths:
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as lines:
                found.update(parse_env_lines(lines, path))
    return found


def parse_env_lines(lines, path):
    """Blank lines and lines that start with # count for nothing; a value is taken as it is, quotes included."""
    found = {}
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = line.partition("=")
        if not equals or not key.strip() or any(c.isspace() for c in key.strip()):
            raise LaunchError(f"{path}:{number}: '{line}' is not of the form KEY=VALUE")
        found[key.strip()] = value
    return found


# Of the launcher's own environment, what ranks on other hosts get too: DeepSpeed's list, and what else steers the ranks' talking.
EXPORTED = ("PYTHON", "MLFLOW", "MV2", "UCX", "NCCL", "LD_LIBRARY", "PATH", "GLOO_", "TORCH_", "UNSHARD_", "OMP_")


SECRET = "UNSHARD_MEETING_SECRET"
# What the launcher sets for each rank, host or attempt: nothing from elsewhere may stand in its place.
SET_BY_LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "GROUP_RANK",
                   "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "UNSHARD_RESTART_COUNT",
                   "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"}
# True of this host only, or not for ranks at all.
OF_THIS_HOST = {"UNSHARD_HOST", "UNSHARD_TOOL_TASK", SECRET}


def exported():
    return {key: value for key, value in os.environ.items()
            if key.startswith(EXPORTED) and not key.startswith("MV2_COMM_WORLD_") and key not in SET_BY_LAUNCHER | OF_THIS_HOST}
