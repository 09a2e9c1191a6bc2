"""Start the ranks of a job: `unshard run` and the `deepspeed` command.

The agent that starts, watches and ends the ranks is torchrun's, used as a library. Around it: DeepSpeed's flags, arguments that arrive
byte for byte, the first failing rank's exit code, and no process left behind. Nothing here imports torch before a job really starts.
"""


def main(argv=None, prog="unshard run"):
    """Run the launcher with these arguments (default: the process's own). Returns the exit code."""
    from unshard.launcher.command import run_command

    return run_command(argv, prog)
