"""The command line, with DeepSpeed's flag names. Flags that only matter between hosts are accepted and checked by the plan."""
import argparse

HOSTFILE = "/job/hostfile"


def build_parser(prog):
    parser = argparse.ArgumentParser(
        prog=prog, allow_abbrev=False,
        description="Start a training script on the ranks of this machine.",
        epilog="Everything after the script is handed to it unchanged, with --local_rank=N put in front unless --no_local_rank is given.")
    ranks = parser.add_argument_group("which ranks")
    ranks.add_argument("-n", "--nproc", "--num_gpus", "--num_accelerators", dest="num_gpus", type=int, default=-1, metavar="N",
                       help="ranks to start: one a GPU; on a machine without GPUs, N CPU ranks (default: all GPUs, or 1)")
    ranks.add_argument("--num_nodes", type=int, default=-1, metavar="N", help="hosts to use, from the start of the hostfile")
    ranks.add_argument("-i", "--include", default="", metavar="NODE[:SLOT,...]", help="only these, e.g. localhost:0,2")
    ranks.add_argument("-e", "--exclude", default="", metavar="NODE[:SLOT,...]", help="all but these; not together with --include")
    ranks.add_argument("-H", "--hostfile", default=None, metavar="FILE",
                       help=f"lines of 'name slots=N' (default: {HOSTFILE} if it exists, else this machine)")
    where = parser.add_argument_group("how they find each other")
    where.add_argument("--master_addr", default="", help="address of rank 0 (default: 127.0.0.1)")
    where.add_argument("--master_port", type=int, default=None, help="port of rank 0 (default: 29500, or a free one where that is taken)")
    what = parser.add_argument_group("what is started")
    what.add_argument("--module", action="store_true", help="SCRIPT is a Python module, as with python -m")
    what.add_argument("--no_python", action="store_true", help="SCRIPT is a program of its own (a C++ binary, say)")
    what.add_argument("--no_local_rank", action="store_true", help="don't put --local_rank=N before the script's arguments")
    what.add_argument("--bind_cores_to_rank", action="store_true", help="give each rank its own share of the cores")
    what.add_argument("--bind_core_list", default="", metavar="LIST", help="cores to share out, e.g. 0-3,8 (with --bind_cores_to_rank)")
    out = parser.add_argument_group("output")
    out.add_argument("--dry-run", "--dry_run", action="store_true", help="print what would be started, and stop")
    out.add_argument("--enable_each_rank_log", default="", metavar="DIR", help="write each rank's output to DIR/rankN.log instead")
    out.add_argument("--save_pid", action="store_true", help="keep the launcher's process id in <temporary folder>/<pid>.ds while it runs")
    out.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")
    out.add_argument("--log_level", default="info", choices=["debug", "info", "warning", "error", "critical"], help="of the launcher")
    hosts = parser.add_argument_group("for several hosts, or not built yet")
    hosts.add_argument("--node_rank", type=int, default=-1)
    hosts.add_argument("--no_ssh", action="store_true")
    hosts.add_argument("--no_ssh_check", action="store_true")
    hosts.add_argument("--force_multi", action="store_true")
    hosts.add_argument("--launcher", default="pdsh")
    hosts.add_argument("--launcher_args", default="")
    hosts.add_argument("--ssh_port", type=int, default=None)
    hosts.add_argument("--venv_script", default=None)
    hosts.add_argument("--autotuning", default="", choices=["", "tune", "run"])
    parser.add_argument("script", metavar="SCRIPT", help="what every rank runs")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="for the script")
    return parser
