"""Hosts for tests: network namespaces of this machine, each with its own address, name, files in /etc and a real sshd, joined by links of
a given speed and delay. Nothing of them outlives the test: the namespaces are nameless and go with the processes in them.

    with Hosts(2, mbit=1000, delay_ms=1) as hosts:
        hosts.run(0, ["ssh", "worker-2", "hostname"])                         # any command inside host 0; `popen` likewise
        values = hosts.run_ranks([1, 1], train, 3, limit=60)                  # a function of the test file, as ranks.run_ranks does

Hosts are called worker-1, worker-2, ... and reach each other by those names and by `address(i)`. They share this machine's files and
process ids, but neither its network nor its host name. Where that isn't possible (`missing()` says why) entering raises
unittest.SkipTest, which pytest reports as a skip with the reason.
"""
import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import ranks

LINK = "eth0"
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
UNSHARE = ["unshare", "--net", "--uts", "--mount"]
SSHD = "/usr/sbin/sshd"
PR_SET_PDEATHSIG = 1


def missing(ssh=True):
    """Why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"there is no {tool} (Debian's package {package})"
    if ssh and (not os.path.exists(SSHD) or shutil.which("ssh") is None):
        return "there is no sshd or no ssh (Debian's packages openssh-server, openssh-client)"
    tried = subprocess.run([*UNSHARE, "sh", "-c", "ip link add x type bridge"], capture_output=True, text=True)
    return None if tried.returncode == 0 else "namespaces or links aren't permitted: " + (tried.stderr.strip().splitlines() or ["?"])[-1]


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Hosts:
    """`mbit`: speed of each host's link, each way (None: as fast as memory). `delay_ms`: time a packet takes from host to host, added by a
    relay in user space, which carries about 2 Gbit/s. `ssh=False` leaves the sshds out."""

    def __init__(self, count, mbit=None, delay_ms=0, ssh=True):
        self.count, self.mbit, self.delay_ms, self.ssh = count, mbit, delay_ms, ssh
        self.names = [f"worker-{i + 1}" for i in range(count)]
        self._port = 29600
        self._holders, self._daemons, self._started = [], [], []
        self._networks = []                      # a descriptor of each host's: while it is open nobody else gets that one's number
        self._folder = None

    def address(self, i):
        return f"10.77.0.{i + 1}"

    def hostfile(self, path, slots):
        """A DeepSpeed hostfile; `slots`: a number for all or a list."""
        each = slots if isinstance(slots, (list, tuple)) else [slots] * self.count
        pathlib.Path(path).write_text("".join(f"{name} slots={n}\n" for name, n in zip(self.names, each)))
        return str(path)

    # ---- making and ending

    def __enter__(self):
        if reason := missing(self.ssh):
            raise unittest.SkipTest(reason)
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="unshard_hosts_"))
        try:
            self._write_files()
            for name in self.names:
                self._holders.append(self._hold(name))
                self._networks.append(os.open(f"/proc/{self._holders[-1].pid}/ns/net", os.O_RDONLY))
            self._join_by_relay() if self.delay_ms else self._join_by_bridge()
            if self.ssh:
                for i in range(self.count):
                    self._start_sshd(i)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        """What still runs inside the hosts is ended, whoever started it: nobody else can have a process there."""
        for process in self._started:                            # one may still be on its way in
            if process.poll() is None:
                process.kill()
        for _ in range(50):
            inside = self.processes()
            for pid in inside:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            if not inside:
                break
            for process in self._daemons + self._holders:
                process.poll()                                   # reap ours
            time.sleep(0.02)
        for process in self._daemons + self._holders:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
        for network in self._networks:
            os.close(network)
        self._daemons, self._holders, self._started, self._networks = [], [], [], []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def processes(self, i=None):
        """Ids of all processes inside host i (default: any host), the harness's own among them."""
        networks = {f"net:[{os.fstat(network).st_ino}]" for network in (self._networks if i is None else [self._networks[i]])}
        found = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") in networks and not _is_zombie(entry):
                    found.append(int(entry))
            except OSError:
                pass
        return found

    def strangers(self, i=None):
        """Ids of processes inside host i (default: any host) that the harness didn't start: what a test left behind."""
        own = {process.pid for process in self._daemons + self._holders}
        return [pid for pid in self.processes(i) if pid not in own]

    # ---- running things

    def command(self, i, argv, cwd=None):
        pid = str(self._holders[i].pid)
        return ["nsenter", "--target", pid, "--net", "--uts", "--mount", "--", "env", "-C", str(cwd or os.getcwd()), *map(str, argv)]

    def popen(self, i, argv, cwd=None, **options):
        """subprocess.Popen inside host i, leading its own session."""
        options.setdefault("start_new_session", True)
        process = subprocess.Popen(self.command(i, argv, cwd), **options)
        self._started.append(process)
        return process

    def run(self, i, argv, cwd=None, timeout=60, **options):
        """subprocess.run inside host i; output captured as text by default."""
        options.setdefault("capture_output", True)
        options.setdefault("text", True)
        return subprocess.run(self.command(i, argv, cwd), timeout=timeout, **options)

    def run_ranks(self, per_host, function, *args, limit=90, env=None, expect_failure=False):
        """As ranks.run_ranks, with per_host[i] ranks on host i."""
        self._port += 1                                          # no wait for a port that an earlier run just left
        places = [(host, local) for host, count in enumerate(per_host) for local in range(count)]

        def start(rank, command, **options):
            host, local = places[rank]
            own = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(per_host[host]), "MASTER_ADDR": self.address(0),
                   "GLOO_SOCKET_IFNAME": LINK}
            return self.popen(host, command, env=ranks.rank_env(rank, len(places), self._port, {**own, **(env or {})}), **options)

        return ranks.run_ranks(len(places), function, *args, limit=limit, expect_failure=expect_failure, start=start)

    # ---- parts

    def _hold(self, name):
        """A process that keeps a set of namespaces, and ends when this process does."""
        script = """hostname "$1" && ip link set lo up || exit
                    for file in "$2"/etc/*; do mount --bind "$file" "/etc/${file##*/}" || exit; done
                    echo up
                    exec cat"""
        holder = subprocess.Popen([*UNSHARE, "sh", "-c", script, "sh", name, str(self._folder)], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, start_new_session=True)
        if holder.stdout.readline() != b"up\n":
            holder.wait()
            raise RuntimeError(f"the namespaces of {name} can't be made")
        return holder

    def _inside(self, holder, *command):
        subprocess.run(["nsenter", "--target", str(holder.pid), "--net", "--", *command], check=True, timeout=20)

    def _join_by_bridge(self):
        """A switch in a namespace of its own, a cable to each host."""
        switch = self._hold("switch")
        self._daemons.append(switch)
        self._inside(switch, "ip", "link", "add", "bridge", "type", "bridge")
        self._inside(switch, "ip", "link", "set", "bridge", "up")
        for i, holder in enumerate(self._holders):
            self._inside(switch, "ip", "link", "add", f"port{i}", "type", "veth", "peer", "name", LINK, "netns", str(holder.pid))
            self._inside(switch, "ip", "link", "set", f"port{i}", "master", "bridge", "up")
            self._limit(switch, f"port{i}")
            self._set_up(i)

    def _join_by_relay(self):
        pids = [str(holder.pid) for holder in self._holders]
        relay = pathlib.Path(__file__).with_name("relay.py")
        process = subprocess.Popen([sys.executable, "-I", "-S", str(relay), LINK, str(self.delay_ms), *pids], stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, start_new_session=True, preexec_fn=die_with_parent)
        self._daemons.append(process)
        if process.stdout.readline() != b"up\n":
            raise RuntimeError("the relay didn't start")
        for i, holder in enumerate(self._holders):
            self._inside(holder, "ip", "link", "set", LINK, "mtu", "65521")
            self._set_up(i)

    def _set_up(self, i):
        holder = self._holders[i]
        self._inside(holder, "ip", "address", "add", f"{self.address(i)}/24", "dev", LINK)
        self._inside(holder, "ip", "link", "set", LINK, "up")
        self._limit(holder, LINK)

    def _limit(self, holder, device):
        if self.mbit:
            burst = max(128 << 10, int(self.mbit * 1e6 / 8 * 0.002))          # 2 ms worth; at least one 64 KiB packet
            self._inside(holder, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{self.mbit}mbit", "burst", str(burst),
                         "latency", "100ms")

    def _write_files(self):
        """What the hosts see in /etc: each other's names, and an ssh client and server that trust one key made here."""
        etc = self._folder / "etc"
        etc.mkdir()
        names = "".join(f"{self.address(i)} {name}\n" for i, name in enumerate(self.names))
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + names)
        if not self.ssh:
            return
        ssh = etc / "ssh"
        ssh.mkdir()
        for key in ("host_key", "client_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(ssh / key)], check=True, timeout=20)
        shutil.copy(ssh / "client_key.pub", ssh / "authorized_keys")
        known = ",".join(self.names + [self.address(i) for i in range(self.count)])
        (ssh / "ssh_known_hosts").write_text(f"{known} {(ssh / 'host_key.pub').read_text()}")
        (ssh / "ssh_config").write_text("IdentityFile /etc/ssh/client_key\nIdentitiesOnly yes\nUserKnownHostsFile /dev/null\n")
        (ssh / "sshd_config").write_text("HostKey /etc/ssh/host_key\nAuthorizedKeysFile /etc/ssh/authorized_keys\nStrictModes no\n"
                                         "PermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\nPidFile none\nUseDNS no\n"
                                         "MaxStartups 100\nListenAddress 0.0.0.0\n")

    def _start_sshd(self, i):
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)      # where sshd goes before a client has said who it is
        command = self.command(i, [SSHD, "-D", "-E", self._folder / f"sshd-{i}.log", "-f", "/etc/ssh/sshd_config"], cwd="/")
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent)
        self._daemons.append(daemon)
        end = time.monotonic() + 10
        while "Server listening" not in self.sshd_log(i):
            if daemon.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"sshd of {self.names[i]} didn't start: {self.sshd_log(i)}")
            time.sleep(0.01)

    def sshd_log(self, i):
        log = self._folder / f"sshd-{i}.log"
        return log.read_text(errors="replace") if log.exists() else ""


def _is_zombie(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rsplit(")", 1)[1].split()[0] in "ZX"
