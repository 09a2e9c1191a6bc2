"""`unshard report` on made-up machines: what it reads, and that each warning appears when and only when it should."""
import json
import os
import pathlib
import subprocess
import sys

import pytest
from unshard.report import Machine, collect, findings, show
from unshard.report.gpus import parse_topology, summary
from unshard.report.network import nccl_matches
from unshard.report.processor import best_isa, parse_core_list

GIB = 1 << 30
AVX512 = "fma avx2 f16c avx512f avx512bw avx512dq avx512vl"
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            {files}                1048576              files
Max locked memory         {locked}              unlimited            bytes
Max address space         {space}            unlimited            bytes
"""
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31
GPU1\tNV18\t X \tNV18\tSYS\t0-31
GPU2\tSYS\tNV18\t X \tSYS\t0-31
NIC0\tPIX\tSYS\tSYS\t X \t

Legend:

  NV#  = Connection traversing a bonded set of # NVLinks
"""


class Made:
    """A machine where nothing is wrong, to be spoilt by a test: 8 cores, 16 GiB, eth0 at 10 Gbit/s with the host name's address."""

    def __init__(self, root):
        self.root, self.environ, self.search_path = root, {}, []
        self.names = {"node-a": ["10.0.0.1"]}
        self.addresses = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1")]
        self.dev_shm, self.memfd, self.programs = (8 * GIB, 8 * GIB), "", {}
        self.probe = {"torch": "2.13.0+cpu", "cuda_available": False, "engine": "_core.so"}
        self.write("/proc/sys/kernel/hostname", "node-a\n")
        self.write("/proc/sys/kernel/osrelease", "6.1.0\n")
        self.write("/etc/os-release", 'NAME="Made"\nPRETTY_NAME="Made Linux 1"\n')
        self.write("/proc/self/cgroup", "0::/job/step\n")
        self.write("/proc/self/status", "Name:\tpython\nCpus_allowed_list:\t0-7\n")
        self.write("/proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n")
        self.cpu(AVX512)
        self.limits()
        self.interface("lo", kind=772, speed="", operstate="unknown", flags="0x9")
        self.interface("eth0", physical=True)
        self.torch("one")

    def write(self, path, text):
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cpu(self, flags):
        self.write("/proc/cpuinfo", "".join(f"processor\t: {i}\nmodel name\t: Made CPU\nflags\t\t: {flags}\n\n" for i in range(8)))

    def limits(self, files="65536", locked="unlimited", space="unlimited"):
        self.write("/proc/self/limits", LIMITS.format(files=files, locked=locked, space=space))

    def interface(self, name, kind=1, speed="10000", operstate="up", flags="0x1003", physical=False):
        folder = f"/sys/class/net/{name}"
        for file, text in (("type", kind), ("speed", speed), ("operstate", operstate), ("flags", flags), ("mtu", 1500)):
            self.write(f"{folder}/{file}", f"{text}\n")
        if physical:
            self.write(f"{folder}/device/vendor", "")

    def torch(self, where, cuda="None", package="torch"):
        self.write(f"/packages/{where}/{package}/__init__.py", "")
        self.write(f"/packages/{where}/{package}/version.py", f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\n")
        folder = str(self.root / "packages" / where)
        self.search_path += [] if folder in self.search_path else [folder]

    def infiniband(self, state="4: ACTIVE"):
        for file, text in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand")):
            self.write(f"/sys/class/infiniband/mlx5_0/ports/1/{file}", f"{text}\n")

    def gpus(self, count=2, topology=""):
        rows = "".join(f"{i}, Made GPU, 81920, 550.1\n" for i in range(count))
        self.programs["--query-gpu"] = rows
        self.programs["topo"] = topology

    def resolve(self, name):
        if name not in self.names:
            raise OSError(-2, "Name or service not known")
        return self.names[name]

    def run(self, argv):
        return self.programs.get(argv[1].split("=")[0])

    def facts(self, ranks=None):
        machine = Machine(root=self.root, environ=self.environ, search_path=self.search_path, resolve=self.resolve,
                          ipv4=lambda: self.addresses, file_system=lambda path: self.dev_shm, memfd=lambda: self.memfd, run=self.run,
                          probe=lambda: self.probe)
        return collect(machine, ranks)

    def found(self, ranks=None):
        return {one.name: one for one in findings(self.facts(ranks))}


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path)


# ---- each finding, and the nearest machine that mustn't have it

def hostname(*addresses):
    return lambda m: m.names.update({"node-a": list(addresses)})


def no_hostname(m):
    m.names.clear()


def env(**variables):
    return lambda m: m.environ.update(variables)


def launched(world, local):
    return env(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(local), OMP_NUM_THREADS="1")


def eth1(**options):
    def add(m):
        m.interface("eth1", **options)
        m.addresses.append(("eth1", "10.1.0.1"))
    return add


def eth0(**options):
    return lambda m: m.interface("eth0", physical=True, **options)


def bare_eth1(m):
    m.interface("eth1")


def only_loopback(m):
    m.interface("eth0", operstate="down")
    m.addresses = [("lo", "127.0.0.1")]


def two(package):
    def add(m):
        m.torch("one", package=package)
        m.torch("two", package=package)
    return add


def same_twice(m):
    (m.root / "packages" / "link").symlink_to(m.root / "packages" / "one")
    m.search_path += [str(m.root / "packages" / "link"), m.search_path[0]]


def limits(**values):
    return lambda m: m.limits(**values)


def field(name, value):
    return lambda m: setattr(m, name, value)


def probe(**values):
    return lambda m: m.probe.update(values)


def infiniband(state="4: ACTIVE"):
    return lambda m: m.infiniband(state)


def gpus(cuda="None", topology=""):
    def add(m):
        m.gpus(topology=topology)
        m.torch("one", cuda=cuda)
    return add


def driver_only(m):
    m.write("/proc/driver/nvidia/gpus/0000:01:00.0/information", "")


def quota(cores):
    return lambda m: m.write("/sys/fs/cgroup/job/cpu.max", f"{cores * 100000} 100000\n")


CUDA = "'12.8'"
CASES = {
    "several_torch": ([two("torch")], [same_twice]),
    "several_deepspeed": ([two("deepspeed")], [lambda m: m.torch("one", package="deepspeed")]),
    "torch_import": ([probe(torch_error="ImportError: libx.so")], []),
    "engine_import": ([probe(engine_error="ImportError: undefined symbol")], [probe(torch_error="no", engine_error="no")]),
    "isa_unknown": ([env(UNSHARD_CPU_ISA="sse")], [env(UNSHARD_CPU_ISA="avx512")]),
    "isa_lowered": ([env(UNSHARD_CPU_ISA="avx2")], [lambda m: m.cpu("fma avx2 f16c"), env(UNSHARD_CPU_ISA="avx512")]),
    "threads_malformed": ([env(OMP_NUM_THREADS="many")], [env(OMP_NUM_THREADS="4,2")]),
    "too_many_threads": ([env(OMP_NUM_THREADS="9")], [env(OMP_NUM_THREADS="8")]),
    "no_memfd": ([field("memfd", "memfd_create: Operation not permitted (EPERM)")], [field("memfd", "")]),
    "sharing_off": ([env(UNSHARD_SHARE_MEMORY="off")], [env(UNSHARD_SHARE_MEMORY="auto")]),
    "small_dev_shm": ([field("dev_shm", (64 << 20, 64 << 20))], [field("dev_shm", (GIB, 0))]),
    "few_open_files": ([limits(files="1023")], [limits(files="1024")]),
    "address_space": ([limits(space="8589934592")], [limits(space="unlimited")]),
    "locked_memory": ([infiniband(), limits(locked="8388608")], [limits(locked="8388608")]),
    "no_nvidia_smi": ([driver_only], [driver_only, gpus(CUDA), probe(cuda_available=True)]),
    "gpus_hidden": ([gpus(CUDA), env(CUDA_VISIBLE_DEVICES="")], [gpus(CUDA), env(CUDA_VISIBLE_DEVICES="1"), probe(cuda_available=True)]),
    "cpu_torch": ([gpus()], [gpus(CUDA), probe(cuda_available=True)]),
    "no_cuda": ([gpus(CUDA)], [gpus(CUDA), probe(cuda_available=True)]),
    "gloo_interface_missing": ([env(GLOO_SOCKET_IFNAME="eth7")], [env(GLOO_SOCKET_IFNAME="eth0")]),
    "gloo_interface_down": ([eth1(operstate="down"), env(GLOO_SOCKET_IFNAME="eth1")], [eth1(), env(GLOO_SOCKET_IFNAME="eth1")]),
    "gloo_interface_without_address": ([bare_eth1, env(GLOO_SOCKET_IFNAME="eth1")], [eth1(), env(GLOO_SOCKET_IFNAME="eth1")]),
    "gloo_interface_loopback": ([env(GLOO_SOCKET_IFNAME="lo")], [env(GLOO_SOCKET_IFNAME="lo"), launched(2, 2)]),
    "host_name_unknown": ([no_hostname], [no_hostname, env(GLOO_SOCKET_IFNAME="eth0")]),
    "host_name_elsewhere": ([hostname("10.9.9.9")], [hostname("10.9.9.9", "10.0.0.1")]),
    "host_name_loopback": ([hostname("127.0.1.1")], [hostname("127.0.1.1"), launched(2, 2)]),
    "interface_down": ([eth0(operstate="down"), eth1()], [eth0(operstate="unknown"), eth1()]),
    "no_interface": ([only_loopback, hostname("127.0.0.1")], [hostname("10.0.0.1")]),
    "slower_interface": ([eth1(speed="100000")], [eth1(speed="1000")]),
    "nccl_interface_missing": ([env(NCCL_SOCKET_IFNAME="ib")], [env(NCCL_SOCKET_IFNAME="eth")]),
    "master_unknown": ([env(MASTER_ADDR="node-z")], [env(MASTER_ADDR="node-a")]),
    "master_loopback": ([hostname("127.0.1.1"), env(MASTER_ADDR="node-a", GLOO_SOCKET_IFNAME="eth0"), launched(4, 2)],
                        [env(MASTER_ADDR="node-a", GLOO_SOCKET_IFNAME="eth0"), launched(4, 2)]),
    "infiniband_down": ([infiniband("1: DOWN")], [infiniband()]),
    "infiniband_off": ([infiniband(), env(NCCL_IB_DISABLE="1")], [infiniband(), env(NCCL_IB_DISABLE="0")]),
    "nvlink_off": ([gpus(CUDA, TOPOLOGY), probe(cuda_available=True), env(NCCL_P2P_DISABLE="1")],
                   [gpus(CUDA, TOPOLOGY), probe(cuda_available=True)]),
}


def test_a_sound_machine_has_no_findings(made):
    assert made.found() == {}
    assert "Nothing wrong was found." in show(made.facts(), [])


@pytest.mark.parametrize("name", CASES)
def test_finding_appears_alone_when_it_should(made, name):
    for spoil in CASES[name][0]:
        spoil(made)
    found = made.found()
    assert list(found) == [name]
    assert found[name].what and found[name].cure


@pytest.mark.parametrize("name", CASES)
def test_finding_is_absent_from_the_nearest_sound_machine(made, name):
    for change in CASES[name][1]:
        change(made)
    assert name not in made.found()


def test_every_rule_has_a_case():
    folder = pathlib.Path(sys.modules["unshard.report"].__file__).parent
    text = "".join(file.read_text() for file in folder.glob("rules_*.py"))
    yields = {part.split('"')[1] for part in text.split("yield (")[1:]}
    assert yields == set(CASES)


def test_threads_count_ranks_and_the_quota(made):
    assert "too_many_threads" in made.found(ranks=2)                         # OMP_NUM_THREADS unset: 8 threads each
    made.environ["OMP_NUM_THREADS"] = "4"
    assert made.found(ranks=2) == {}
    quota(6)(made)
    found = made.found(ranks=2)["too_many_threads"]
    assert "2 ranks of 4 threads share 6 cores" in found.what and "OMP_NUM_THREADS=3" in found.cure
    assert "at most 6 ranks" in made.found(ranks=9)["too_many_threads"].cure


def test_open_files_grow_with_the_ranks(made):
    made.limits(files="2048")
    launched(32, 8)(made)
    assert made.found() == {}
    launched(33, 8)(made)
    assert "2112 are wanted for 33 ranks" in made.found()["few_open_files"].what


def test_the_cure_names_the_interface_to_take(made):
    hostname("127.0.1.1")(made)
    made.interface("docker0", speed="40000")
    made.addresses.append(("docker0", "172.17.0.1"))
    assert "export GLOO_SOCKET_IFNAME=eth0 " in made.found()["host_name_loopback"].cure


def test_problems_come_before_notes(made):
    made.memfd, made.dev_shm = "memfd_create: not there", None
    hostname("127.0.1.1")(made)
    found = findings(made.facts())
    assert [one.level for one in found] == ["problem", "hosts", "note"]
    text = show(made.facts(), found)
    assert all(one.what in text and one.cure in text for one in found)


# ---- what is read

def test_facts_of_a_machine(made):
    made.write("/proc/net/if_inet6", "fd000000000000000000000000000002 04 40 00 82     eth0\n")
    made.write("/sys/fs/cgroup/job/step/memory.max", f"{4 * GIB}\n")
    made.write("/sys/fs/cgroup/memory.max", "max\n")
    quota(2)(made)
    made.infiniband()
    made.gpus(3, TOPOLOGY)
    facts = made.facts()
    assert facts["processor"] | {"bf16": []} == {
        "model": "Made CPU", "processors": 8, "numa_nodes": 1, "allowed": 8, "quota": 2.0, "usable": 2, "best_isa": "avx512",
        "flat_passes": "avx512", "isa_wish": "", "bf16": []}
    assert (facts["memory"]["total_bytes"], facts["memory"]["limit_bytes"]) == (16 * GIB, 4 * GIB)
    assert facts["memory"]["limits"] == {"open_files": [65536, 1048576], "locked_memory": [None, None], "address_space": [None, None]}
    assert facts["interfaces"][0] == {"name": "eth0", "kind": "Ethernet", "up": True, "speed_mbit": 10000, "mtu": 1500, "physical": True,
                                      "addresses": ["10.0.0.1", "fd00::2"]}
    assert facts["infiniband"] == [{"device": "mlx5_0", "port": 1, "state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)",
                                    "link_layer": "InfiniBand"}]
    assert facts["gpus"][2] == {"index": 2, "name": "Made GPU", "memory_mib": 81920, "driver": "550.1"}
    assert facts["network"]["gloo"]["interface"] == "eth0" and facts["network"]["nccl"]["interfaces"] == ["eth0"]
    assert facts["software"]["torch"] == "2.13.0" and facts["software"]["os"] == "Made Linux 1"
    assert json.loads(json.dumps(facts)) == facts
    text = show(facts, findings(facts))
    for words in ("Made CPU", "NVLink x18 (2 pairs), SYS (1 pair)", "mlx5_0:1", "eth0 (10.0.0.1), because the host name 'node-a'"):
        assert words in text


def test_a_sys_folder_of_another_network_namespace_does_not_count(made):
    made.write("/proc/net/dev", "Inter-|   Receive\n face |bytes\n    lo: 1 2\n  veth9: 3 4\n")
    made.addresses = [("lo", "127.0.0.1"), ("veth9", "10.0.0.1")]
    found = made.facts()["interfaces"]
    assert [(one["name"], one["kind"], one["up"]) for one in found] == [("lo", "loopback", True), ("veth9", "kind unknown", True)]
    assert made.found() == {}


def test_a_bare_machine_is_no_error(tmp_path):
    def nothing(name):
        raise OSError(-2, "no names")
    machine = Machine(root=tmp_path, environ={}, search_path=[], resolve=nothing, ipv4=list, file_system=lambda path: None,
                      memfd=lambda: "no memfd", run=lambda argv: None, probe=lambda: {"torch_error": "No module named 'torch'"})
    facts = collect(machine)
    assert {one.name for one in findings(facts)} == {"torch_import", "no_memfd", "small_dev_shm"}
    assert "No module named 'torch'" in show(facts, findings(facts))


def test_topology_counts_pairs_once():
    links = parse_topology(TOPOLOGY)
    assert [(one["a"], one["b"], one["link"]) for one in links] == [("GPU0", "GPU1", "NV18"), ("GPU0", "GPU2", "SYS"),
                                                                    ("GPU1", "GPU2", "NV18")]
    assert summary(links) == {"NVLink x18": 2, "SYS": 1}


@pytest.mark.parametrize("wish, name, hit", [("eth", "eth0", True), ("eth,ib", "ib0", True), ("eth", "lo", False), ("=eth", "eth0", False),
                                             ("=eth0", "eth0", True), ("^docker,lo", "eth0", True), ("^docker,lo", "docker0", False),
                                             ("^=lo", "lo0", True), ("^=lo", "lo", False)])
def test_nccl_reads_its_interface_variable_so(wish, name, hit):
    assert nccl_matches(wish, name) is hit


def test_instruction_sets():
    assert best_isa(set(AVX512.split())) == "avx512"
    assert best_isa(set(AVX512.split()) - {"avx512vl"}) == "avx2"
    assert best_isa(set(AVX512.split()) - {"f16c"}) == "portable"
    assert parse_core_list("0-2,8") == [0, 1, 2, 8]


# ---- this machine

def test_the_command_on_this_machine_and_the_engine_agree_on_the_instruction_set():
    ask = ("import ctypes, torch, unshard._core as core; isa = ctypes.CDLL(core.__file__)._ZN7unshard7kernels3isaEv; "
           "isa.restype = ctypes.c_char_p; print(isa().decode())")
    env = {key: value for key, value in os.environ.items() if key != "UNSHARD_CPU_ISA"}
    asked = subprocess.Popen([sys.executable, "-c", ask], env=env, stdout=subprocess.PIPE, text=True)
    done = subprocess.run([sys.executable, "-m", "unshard.cli", "report", "--json"], env=env, capture_output=True, text=True, timeout=60)
    isa, _ = asked.communicate(timeout=60)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["processor"]["flat_passes"] == isa.strip()
    assert "engine" in facts["software"]["probe"], facts["software"]["probe"]
    assert facts["software"]["compiler"]
    assert facts["memory"]["memfd_error"] == ""
    assert any(one["name"] == "lo" for one in facts["interfaces"])
