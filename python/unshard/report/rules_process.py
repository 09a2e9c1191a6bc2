"""Rules about software, processor, memory and GPUs. Each is given all facts and yields (name, level, what, cure)."""
import sys

from unshard.report.processor import ISAS

ENOUGH_OPEN_FILES = 1024
FILES_A_RANK = 64                  # connections to it in the groups of a job, with room for data files
ENOUGH_DEV_SHM = 1 << 30


def torch_installs(facts):
    folders = facts["software"]["torch_folders"]
    if len(folders) > 1:
        yield ("several_torch", "problem", f"there are {len(folders)} installs of torch on Python's path; {folders[0]} hides "
               f"{', '.join(folders[1:])}: libraries of both may end up in one process",
               f"uninstall all but one, or start with `{sys.executable} -s` and no PYTHONPATH to see which comes from where")


def deepspeed_installs(facts):
    folders = facts["software"]["deepspeed_folders"]
    if len(folders) > 1:
        yield ("several_deepspeed", "problem", f"there are {len(folders)} packages called deepspeed on Python's path; "
               f"`import deepspeed` takes {folders[0]}, not {', '.join(folders[1:])}", "uninstall the one that isn't wanted")


def imports(facts):
    probe = facts["software"]["probe"]
    if "torch_error" in probe:
        yield ("torch_import", "problem", f"torch can't be imported: {probe['torch_error']}",
               f"install torch for {facts['software']['python_program']}, or run the Python that has it")
    elif "engine_error" in probe:
        yield ("engine_import", "problem", f"the engine (unshard._core) can't be loaded: {probe['engine_error']}",
               f"build it against this torch ({probe.get('torch', 'unknown')}): it only fits the version that it was built with")


def instruction_set(facts):
    cpu = facts["processor"]
    if cpu["isa_wish"] and cpu["isa_wish"] not in ISAS:
        yield ("isa_unknown", "problem", f"UNSHARD_CPU_ISA={cpu['isa_wish']} is none of {', '.join(ISAS)}", "unset it")
    elif cpu["flat_passes"] != cpu["best_isa"]:
        yield ("isa_lowered", "note",
               f"UNSHARD_CPU_ISA={cpu['isa_wish']} lowers the flat passes from {cpu['best_isa']}: the same bits, slower",
               "unset it unless you are testing")


def threads(facts):
    cores, job = facts["processor"]["usable"], facts["job"]
    ranks, said = job["local_ranks"], job["omp_num_threads"]
    if said and not said.split(",")[0].strip().isdigit():
        yield ("threads_malformed", "problem", f"OMP_NUM_THREADS='{said}' isn't a number; it is ignored", "set it to a number, or unset it")
        return
    each = int(said.split(",")[0]) if said else cores
    if cores and each * ranks > cores:
        why = f"OMP_NUM_THREADS={said}" if said else "OMP_NUM_THREADS isn't set, so each starts one a core"
        less = f"export OMP_NUM_THREADS={cores // ranks} (`unshard run` does so unless it is set)"
        fewer = f"start at most {cores} ranks here, with OMP_NUM_THREADS=1"
        who = f"{ranks} rank{'s' * (ranks > 1)} of {each} thread{'s' * (each > 1)}"
        yield ("too_many_threads", "problem", f"{who} share {cores} core{'s' * (cores > 1)} ({why}): they stand in each other's way",
               less if cores >= ranks else fewer)


def shared_memory(facts):
    memory = facts["memory"]
    if memory["memfd_error"]:
        yield ("no_memfd", "problem", f"ranks of this host can't share memory: {memory['memfd_error']}",
               "allow memfd_create (the container's seccomp profile, vm.memfd_noexec), or set UNSHARD_SHARE_MEMORY=off, which is slower")
    elif facts["job"]["share_memory"] == "off":
        yield ("sharing_off", "note", "UNSHARD_SHARE_MEMORY=off: ranks of this host hold a copy each and talk through sockets", "unset it")
    size = memory["dev_shm_bytes"]
    if size is None or size < ENOUGH_DEV_SHM:
        what = "there is no /dev/shm" if size is None else f"/dev/shm has only {size >> 20} MiB"
        yield ("small_dev_shm", "note", f"{what}: Unshard doesn't use it, but NCCL and the workers of a torch DataLoader do",
               "start the container with --shm-size=8g or --ipc=host")


def limits(facts):
    found, ranks = facts["memory"]["limits"], facts["job"]["world"]
    files = found.get("open_files", [None])[0]
    wanted = max(ENOUGH_OPEN_FILES, FILES_A_RANK * ranks)
    if files is not None and files < wanted:
        yield ("few_open_files", "problem", f"a process may open only {files} files (ulimit -n); {wanted} are wanted"
               + (f" for {ranks} ranks" if ranks > 1 else ""), "ulimit -n 65536, or raise nofile in /etc/security/limits.conf")
    space = found.get("address_space", [None])[0]
    if space is not None:
        yield ("address_space", "problem",
               f"address space is limited to {space >> 20} MiB (ulimit -v): shared memory is mapped with room to grow",
               "ulimit -v unlimited")
    locked = found.get("locked_memory", [None])[0]
    if locked is not None and facts["infiniband"]:
        yield ("locked_memory", "hosts", f"only {locked >> 10} KiB may be locked (ulimit -l): InfiniBand must lock what it sends",
               "ulimit -l unlimited, or memlock in /etc/security/limits.conf; in a container --ulimit memlock=-1")


def gpu_software(facts):
    gpus, software = facts["gpus"], facts["software"]
    probe = software["probe"]
    if facts["gpu_driver_without_tool"]:
        yield ("no_nvidia_smi", "note", "the NVIDIA driver is loaded, but nvidia-smi isn't here or fails: GPUs and links aren't listed",
               "install the driver's tools; in a container use the NVIDIA container toolkit")
    if not gpus or "torch_error" in probe:
        return
    hidden = facts["job"]["cuda_visible_devices"]
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        yield ("gpus_hidden", "note", f"CUDA_VISIBLE_DEVICES='{hidden}' hides all {len(gpus)} GPUs", "unset it to use them")
    elif not software["torch_cuda"]:
        yield ("cpu_torch", "problem", f"there are {len(gpus)} GPUs, but this torch ({software['torch']}) is built for the CPU only",
               "install the CUDA build of torch and build the engine against it")
    elif not probe.get("cuda_available"):
        yield ("no_cuda", "problem",
               f"torch ({software['torch']}, CUDA {software['torch_cuda']}) can't use the GPUs; driver {gpus[0]['driver']}",
               "update the driver to one that knows this CUDA, or install a torch for an older CUDA")


RULES = [torch_installs, deepspeed_installs, imports, instruction_set, threads, shared_memory, limits, gpu_software]
