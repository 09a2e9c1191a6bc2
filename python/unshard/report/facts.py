"""All facts about a machine, as nested dictionaries that JSON can hold."""
from unshard.report import gpus, memory, network, processor, software


def collect(machine, ranks=None):
    """`ranks`: how many will run here, when no launcher has said so."""
    found = network.interfaces(machine)
    name = network.host_name(machine)
    return {
        "software": software.software(machine),
        "processor": processor.processor(machine),
        "memory": memory.memory(machine),
        "gpus": gpus.gpus(machine),
        "gpu_links": gpus.gpu_links(machine),
        "gpu_driver_without_tool": gpus.driver_without_tool(machine),
        "infiniband": network.infiniband(machine),
        "interfaces": found,
        "network": {"host_name": name, "gloo": network.gloo_choice(machine.environ, name, found),
                    "nccl": network.nccl_choice(machine.environ, found)},
        "job": job(machine, ranks),
    }


def job(machine, ranks):
    """What the environment says of the ranks."""
    environ = machine.environ
    local = environ.get("LOCAL_WORLD_SIZE", "")
    launched = local.isdigit() and environ.get("WORLD_SIZE", "").isdigit()
    local_ranks = ranks or (int(local) if local.isdigit() else 1)
    return {
        "launched": launched, "local_ranks": local_ranks, "world": int(environ["WORLD_SIZE"]) if launched else local_ranks,
        "omp_num_threads": environ.get("OMP_NUM_THREADS", ""), "share_memory": environ.get("UNSHARD_SHARE_MEMORY", ""),
        "cuda_visible_devices": environ.get("CUDA_VISIBLE_DEVICES"), "nccl_ib_disable": environ.get("NCCL_IB_DISABLE", ""),
        "nccl_p2p_disable": environ.get("NCCL_P2P_DISABLE", ""), **_master(machine),
    }


def _master(machine):
    name = machine.environ.get("MASTER_ADDR", "")
    if not name:
        return {"master_addr": "", "master_addresses": [], "master_error": ""}
    try:
        return {"master_addr": name, "master_addresses": machine.resolve(name), "master_error": ""}
    except OSError as error:
        return {"master_addr": name, "master_addresses": [], "master_error": error.strerror or str(error)}
