"""Rules about interfaces, names and links. Each is given all facts and yields (name, level, what, cure)."""
from unshard.report.network import best_interface, describe, is_loopback, is_reachable, speed_text


def by_name(facts, name):
    return next((one for one in facts["interfaces"] if one["name"] == name), None)


def export(facts, variable):
    """The cure for a wrong interface."""
    best = best_interface(facts["interfaces"])
    return f"export {variable}={best['name']} on every host (each with its own name for it)" if best else "bring an interface up"


def only_this_host(facts):
    """A launcher has said that all ranks are here."""
    job = facts["job"]
    return job["launched"] and job["world"] == job["local_ranks"]


def gloo_interface_named(facts):
    choice = facts["network"]["gloo"]
    if choice["state"] != "named":
        return
    one, said = by_name(facts, choice["interface"]), choice["why"]
    if one is None:
        there = ", ".join(other["name"] for other in facts["interfaces"])
        yield ("gloo_interface_missing", "problem", f"{said}, but there is no such interface here (there is {there or 'none'})",
               f"{export(facts, 'GLOO_SOCKET_IFNAME')}, or unset it")
    elif not one["up"]:
        yield ("gloo_interface_down", "problem", f"{said}, but that interface is down",
               f"ip link set {one['name']} up, or {export(facts, 'GLOO_SOCKET_IFNAME')}")
    elif not one["addresses"]:
        yield ("gloo_interface_without_address", "problem", f"{said}, but that interface has no address",
               f"give it one, or {export(facts, 'GLOO_SOCKET_IFNAME')}")
    elif one["kind"] == "loopback" and best_interface(facts["interfaces"]) and not only_this_host(facts):
        yield ("gloo_interface_loopback", "hosts", f"{said} keeps Gloo on this host", export(facts, "GLOO_SOCKET_IFNAME"))


def gloo_by_host_name(facts):
    choice, name = facts["network"]["gloo"], facts["network"]["host_name"]
    if choice["state"] == "named" or not best_interface(facts["interfaces"]) or only_this_host(facts):
        return
    cure = f"{export(facts, 'GLOO_SOCKET_IFNAME')}, or give '{name['name']}' its real address in /etc/hosts"
    if not name["addresses"]:
        yield ("host_name_unknown", "hosts",
               f"the host name '{name['name']}' doesn't resolve ({name['error']}): Gloo falls back to 127.0.0.1, where no "
               "other host reaches it", cure)
    elif choice["state"] == "fallback":
        yield ("host_name_elsewhere", "hosts",
               f"the host name '{name['name']}' resolves to {', '.join(name['addresses'])}, none of it an address of this host: Gloo falls "
               "back to 127.0.0.1, where no other host reaches it", cure)
    elif is_loopback(choice["address"]):
        yield ("host_name_loopback", "hosts",
               f"the host name '{name['name']}' resolves to {choice['address']}, so Gloo would listen where no other host reaches it", cure)


def interface_down(facts):
    choice = facts["network"]["gloo"]
    one = by_name(facts, choice["interface"])
    if choice["state"] == "host name" and one and not one["up"]:
        yield ("interface_down", "problem", f"the host name resolves to {choice['address']} on {one['name']}, which is down",
               f"ip link set {one['name']} up, or {export(facts, 'GLOO_SOCKET_IFNAME')}")
    if not best_interface(facts["interfaces"]) and any(other["kind"] != "loopback" for other in facts["interfaces"]):
        names = ", ".join(other["name"] for other in facts["interfaces"] if other["kind"] != "loopback")
        yield ("no_interface", "hosts", f"no interface is up with an address that other hosts could reach ({names})",
               "bring one up and give it an address")


def slower_interface(facts):
    one = by_name(facts, facts["network"]["gloo"]["interface"])
    faster = [other for other in facts["interfaces"] if one and one["up"] and one["kind"] != "loopback" and other["up"]
              and any(map(is_reachable, other["addresses"])) and (other["speed_mbit"] or 0) > (one["speed_mbit"] or 1 << 60)]
    if faster:
        best = max(faster, key=lambda other: other["speed_mbit"])
        yield ("slower_interface", "hosts", f"Gloo will use {describe(one)}, but {describe(best)} is faster",
               f"export GLOO_SOCKET_IFNAME={best['name']} if it leads to the other hosts ({speed_text(best['speed_mbit'])})")


def nccl_interface(facts):
    choice = facts["network"]["nccl"]
    if choice["why"].startswith("NCCL_SOCKET_IFNAME=") and not choice["interfaces"]:
        yield ("nccl_interface_missing", "problem" if facts["gpus"] else "note",
               f"{choice['why']} matches no interface that is up with an address", f"{export(facts, 'NCCL_SOCKET_IFNAME')}, or unset it")


def master_address(facts):
    job = facts["job"]
    if not job["master_addr"]:
        return
    if job["master_error"]:
        yield ("master_unknown", "problem", f"MASTER_ADDR={job['master_addr']} doesn't resolve here ({job['master_error']})",
               "give rank 0's address as a number, or add the name to /etc/hosts on every host")
    elif job["launched"] and job["world"] > job["local_ranks"] and any(map(is_loopback, job["master_addresses"])):
        yield ("master_loopback", "problem",
               f"MASTER_ADDR={job['master_addr']} means {job['master_addresses'][0]} here, but ranks run on several hosts",
               "give an address of rank 0's host that the others reach")


def infiniband_ports(facts):
    ports = facts["infiniband"]
    if ports and not any(one["state"] == "ACTIVE" for one in ports):
        listed = ", ".join(f"{one['device']}:{one['port']} {one['state']}" for one in ports)
        yield ("infiniband_down", "hosts", f"no InfiniBand port is active ({listed}): NCCL will use sockets",
               "check cable, switch and subnet manager (ibstat)")
    elif ports and facts["job"]["nccl_ib_disable"] not in ("", "0"):
        yield ("infiniband_off", "hosts", "NCCL_IB_DISABLE is set: NCCL won't use the InfiniBand that is here", "unset it")


def nvlink_off(facts):
    if facts["job"]["nccl_p2p_disable"] not in ("", "0") and any(one["link"].startswith("NV") for one in facts["gpu_links"]):
        yield ("nvlink_off", "note", "NCCL_P2P_DISABLE is set: NCCL won't use NVLink", "unset it")


RULES = [gloo_interface_named, gloo_by_host_name, interface_down, slower_interface, nccl_interface, master_address, infiniband_ports,
         nvlink_off]
