"""Start the ranks of a job: `unshard run` and the `deepspeed` command.

The agent that starts, watches and ends a host's ranks is torchrun's, used as a library. Around it: DeepSpeed's flags, arguments that arrive
byte for byte, the first failing rank's exit code, and no process left behind. Nothing here imports torch before a job really starts.

    command -> options -> plan            what is asked for: which hosts, how many ranks, what they run
    job -> agent (one machine)            the attempts; here the agent runs in the launcher itself (guard: in a child of it)
        -> connect, hub ~ node -> agent   several hosts: a line to node.py on each, by ssh; preflight decides whether all fit
        -> gather ~ meeting               the same where each host was given the command; tools: pdsh, srun, mpirun give it
    watch, report, outlet                 who failed first, what it said; every line with its rank, whatever becomes of where it goes
"""
from unshard.streams import command


@command("unshard run")
def main(argv=None, prog="unshard run"):
    """Run the launcher with these arguments (default: the process's own). Returns the exit code."""
    from unshard.launcher.command import run_command

    return run_command(argv, prog)
