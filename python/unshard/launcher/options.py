"""The command line, with DeepSpeed's flag names."""
import argparse

HOSTFILE = "/job/hostfile"
TOOLS = ("pdsh", "slurm", "openmpi")          # programs of others that can start a process on each host


def build_parser(prog):
    parser = argparse.ArgumentParser(
        prog=prog, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{prog} [OPTIONS] SCRIPT [ARGUMENTS...]",
        description="Start a training script on the ranks of this machine, or of all hosts in a hostfile.",
        epilog=f"""Everything after SCRIPT is handed to it unchanged, with --local_rank=N put in front unless --no_local_rank is given.

examples:
  {prog} --num_gpus=2 train.py --deepspeed_config ds_config.json
  {prog} --hostfile=./my_hostfile --num_nodes=2 --num_gpus=8 train.py --deepspeed_config ds_config.json
  {prog} --hostfile=./my_hostfile --include=worker-1@worker-2:0,2 --dry-run train.py
  {prog} --no_ssh --num_nodes=2 --node_rank=0 --master_addr=worker-1 train.py      (and --node_rank=1 on the other host)""")
    add_ranks(parser.add_argument_group("which ranks"))
    add_meeting(parser.add_argument_group("how they find each other"))
    add_hosts(parser.add_argument_group("how other hosts are reached"))
    add_started(parser.add_argument_group("what is started"))
    add_output(parser.add_argument_group("output"))
    parser.add_argument("script", metavar="SCRIPT", help="what every rank runs")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="for the script").required = False
    return parser


def add_ranks(group):
    group.add_argument("-n", "--nproc", "--num_gpus", "--num_accelerators", dest="num_gpus", type=int, default=-1, metavar="N",
                       help="ranks a host: one a GPU, or N CPU ranks (default: all slots; without a hostfile all GPUs, or 1)")
    group.add_argument("--num_nodes", type=int, default=-1, metavar="N", help="hosts to use, from the start of the hostfile (default: all)")
    group.add_argument("-H", "--hostfile", default=None, metavar="FILE",
                       help=f"lines of 'name slots=N' (default: {HOSTFILE} if it exists, else this machine alone)")
    group.add_argument("-i", "--include", default="", metavar="FILTER",
                       help="only these: NODE[:SLOT,...] joined by @, e.g. worker-1@worker-2:0,2")
    group.add_argument("-e", "--exclude", default="", metavar="FILTER", help="all but these; not together with --include")
    group.add_argument("--max-restarts", "--max_restarts", type=int, default=0, metavar="N",
                       help="after a failure start all ranks again, up to N times; scripts resume from their newest checkpoint")


def add_meeting(group):
    group.add_argument("--master_addr", default="", metavar="ADDRESS",
                       help="of rank 0's host (default: found: 127.0.0.1 on one host, else the address at which the others see it)")
    group.add_argument("--master_port", type=int, default=None, metavar="PORT",
                       help="of rank 0 (default: 29500, or a free one where that is taken)")


def add_hosts(group):
    group.add_argument("--launcher", type=str.lower, default="ssh", choices=["ssh", *TOOLS],
                       help="what starts a process on each host (default: ssh)")
    group.add_argument("--launcher_args", default="", metavar="ARGS", help="more arguments for that program, in one word")
    group.add_argument("--ssh_port", type=int, default=None, metavar="PORT", help="where the hosts' sshd listens")
    group.add_argument("--connect_timeout", type=float, default=30, metavar="S",
                       help="seconds until a host must have answered (default: 30)")
    group.add_argument("--no_ssh_check", action="store_true", help="a host of another version is worth a warning only")
    group.add_argument("--venv_script", default=None, metavar="FILE", help="a shell script that each host sources first")
    group.add_argument("--no_ssh", action="store_true",
                       help="no host is reached from here: this command is given on each of them, with --node_rank")
    group.add_argument("--node_rank", type=int, default=-1, metavar="N", help="which of the hosts this is, with --no_ssh: 0 is the master")
    group.add_argument("--force_multi", action="store_true", help="reach this machine by ssh too, as if it were another")


def add_started(group):
    group.add_argument("--module", action="store_true", help="SCRIPT is a Python module, as with python -m")
    group.add_argument("--no_python", action="store_true", help="SCRIPT is a program of its own (a C++ binary, say)")
    group.add_argument("--no_local_rank", action="store_true", help="don't put --local_rank=N before the script's arguments")
    group.add_argument("--bind_cores_to_rank", action="store_true", help="give each rank its own share of its host's cores")
    group.add_argument("--bind_core_list", default="", metavar="LIST", help="cores to share out, e.g. 0-3,8 (with --bind_cores_to_rank)")
    group.add_argument("--autotuning", default="", choices=["", "tune", "run"], help="not built yet")


def add_output(group):
    group.add_argument("--dry-run", "--dry_run", action="store_true", help="print what would be started, and stop")
    group.add_argument("--no_rank_prefix", action="store_true", help="don't put [rank N] before each line where there are several ranks")
    group.add_argument("--enable_each_rank_log", default="", metavar="DIR",
                       help="write each rank's output to DIR/rankN.log on its host instead")
    group.add_argument("--run-dir", "--run_dir", default="", metavar="DIR",
                       help="each rank writes what it knows to DIR/rankN.json when something goes wrong; `unshard doctor DIR` reads them")
    group.add_argument("--record-at-end", "--record_at_end", action="store_true", help="and at the end of a good run, with --run-dir")
    group.add_argument("--timeline", default="", metavar="DIR",
                       help="trace what each rank does when, into this folder of its host (UNSHARD_TIMELINE)")
    group.add_argument("--save_pid", action="store_true",
                       help="keep the launcher's process id in <temporary folder>/<pid>.ds while it runs")
    group.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")
    group.add_argument("--log_level", default="info", choices=["debug", "info", "warning", "error", "critical"], help="of the launcher")
