"""A real Slurm of two nodes on this machine: its daemons run here, and go with the test."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("meganode0", "meganode1")
_MARK = "# tests/slurm of megalite"
_HOSTS = Path("/etc/hosts")
_CONF = """
ClusterName=megalite
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
KillWait=10
MinJobAge=300
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=25
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""


def missing() -> str:
    """Why no cluster can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "the daemons of Slurm need root"
    absent = [name for name in NEEDED if not shutil.which(name, path=_path())]
    return f"not installed: {', '.join(absent)} (make test-slurm installs them)" if absent else ""


class Cluster:
    """Use as a context. ``folder`` must be short, for a socket lies in it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._end = folder, ExitStack()
        self.env = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Cluster:
        with ExitStack() as end:
            self._name_nodes(end)
            self._write_files()
            self._munge(end)
            self._daemon(end, "slurmctld", "-D")
            for node in NODES:
                self._daemon(end, "slurmd", "-D", "-N", node)
            self.until(lambda: self.idle() == len(NODES), 30)
            self._end = end.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def run(self, *words: str, **env: str) -> str:
        """The output of a command of Slurm; raises if it fails."""
        done = subprocess.run(
            words, env={**self.env, **env}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        return self._shown(job).get("JobState", "GONE")

    def exit_code(self, job: str) -> str:
        return self._shown(job).get("ExitCode", "")

    def restarts(self, job: str) -> int:
        return int(self._shown(job).get("Restarts", "0"))

    def start_now(self, job: str) -> None:
        """A requeued job waits two minutes unless it is told otherwise. One that is still being
        put away is not ready for that, and forgets it: it is told until it runs."""
        deadline, told = time.monotonic() + 60, 0.0
        while (state := self.state(job)) not in ("RUNNING", "COMPLETED"):
            assert time.monotonic() < deadline, f"the job stays {state}"
            if state == "PENDING" and time.monotonic() > told + 10:
                told = time.monotonic()
                self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
            time.sleep(0.5)

    def idle(self) -> int:
        words = ["sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D"]
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60)
        return sum(map(int, done.stdout.split()))

    @staticmethod
    def until(done: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < deadline, "it did not come to pass in time"
            time.sleep(0.1)

    def _shown(self, job: str) -> dict[str, str]:
        words = ["scontrol", "show", "job", "-o", job]
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60)
        return dict(w.split("=", 1) for w in done.stdout.split() if "=" in w)

    def _name_nodes(self, end: ExitStack) -> None:
        """The nodes find each other by name."""
        before = _HOSTS.read_text()
        lines = [line for line in before.splitlines() if not line.endswith(_MARK)]
        plain = "\n".join(lines) + "\n"
        _HOSTS.write_text(plain + f"127.0.0.1 {' '.join(NODES)} {_MARK}\n")
        end.callback(_HOSTS.write_text, plain)

    def _write_files(self) -> None:
        (self._folder / "state").mkdir()
        names = {"host": socket.gethostname().split(".")[0], "folder": self._folder}
        conf = _CONF.format(**names, nodes=NODES, ports=_free_ports(3))
        (self._folder / "slurm.conf").write_text(conf)
        (self._folder / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _munge(self, end: ExitStack) -> None:
        """munged refuses a folder that others may write in, and runs as its own user."""
        home = self._folder / "munge"
        home.mkdir(mode=0o755)
        key = home / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        shutil.chown(home, "munge", "munge")
        shutil.chown(key, "munge", "munge")
        self._folder.chmod(0o755)
        files = {"key-file": key, "pid-file": home / "pid", "log-file": home / "log"}
        files |= {"seed-file": home / "seed", "socket": self._folder / "munge.socket"}
        files["socket"] = home / "socket"
        words = ["munged", "-F", "-f", *(f"--{name}={path}" for name, path in files.items())]
        (self._folder / "munge.socket").symlink_to(home / "socket")
        self._start(end, words, user="munge")
        self.until((home / "socket").exists, 20)

    def _daemon(self, end: ExitStack, *words: str) -> None:
        self._start(end, [*words, "-f", str(self._folder / "slurm.conf")])

    def _start(self, end: ExitStack, words: list[str], user: str | None = None) -> None:
        with open(self._folder / f"{words[0]}.out", "ab") as out:
            process = subprocess.Popen(
                words, env=self.env, user=user, group=user, stdout=out, stderr=out
            )
        end.callback(_stop, process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]
