"""The launch scripts, run for real with a Python, an srun and an scontrol that write down calls."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch.rendezvous import address_of, hosts_of, parse_hosts, port_of

ROOT = Path(__file__).parents[2]

NODE_LISTS = [
    ("alpha,beta", ["alpha", "beta"]),
    ("linux[1,2]", ["linux1", "linux2"]),
    ("jz-ia[810-812]", ["jz-ia810", "jz-ia811", "jz-ia812"]),
    ("a[01-03],b7", ["a01", "a02", "a03", "b7"]),
    ("n[1-2,5]-ib", ["n1-ib", "n2-ib", "n5-ib"]),
    ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
    ("node-1-2", ["node-1-2"]),
    ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
]

# Real Python for everything but the launch itself, which is written down.
PYTHON = """#!/usr/bin/env bash
if [[ $1 != */elastic.py ]]; then exec {python} "$@"; fi
printf '%s\\n' "$@" "OMP_NUM_THREADS=${{OMP_NUM_THREADS-unset}}" > "{root}/call.${{NODE_RANK:-0}}"
exit "${{FAKE_CODE:-0}}"
"""
# One task a node, like srun --ntasks-per-node=1; then waits if told to, until it is stopped.
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "{root}/srun"
while [[ $1 == --* ]]; do shift; done
code=0
for ((n = 0; n < NNODES; n++)); do
  SLURM_STEP_NUM_TASKS=$NNODES SLURM_STEP_NUM_NODES=$NNODES SLURM_NODEID=$n "$@" || code=$?
done
: > "{root}/started"
while [[ -n ${{FAKE_WAIT:-}} && ! -e "{root}/stop" ]]; do sleep 0.02; done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >> "{root}/scontrol"
if [[ $1 == show ]]; then printf '%s\\n' by-scontrol other; fi
if [[ $1 == requeue ]]; then
  script=$PPID
  # As Slurm does, a while after it has answered.
  (
    sleep 1
    kill -0 "$script" && echo ended >> "{root}/scontrol"
    kill -TERM "$script"
  ) > /dev/null 2>&1 &
fi
"""
SCANCEL = """#!/usr/bin/env bash
echo "$*" >> "{root}/scancel"
: > "{root}/stop"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with the scripts and nothing else, in a directory with a space in its name."""
    root = tmp_path / "my checkout"
    (root / "launch").mkdir(parents=True)
    for name in ("torchrun.sh", "slurm.sbatch", "rendezvous.py"):
        shutil.copy(ROOT / "launch" / name, root / "launch")
    put(root / ".venv" / "bin" / "python", PYTHON, root)
    return root


def put(path: Path, text: str, root: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(root=root, python=sys.executable))
    path.chmod(0o755)


def environment(root: Path, env: Mapping[str, str]) -> dict[str, str]:
    return {"PATH": f"{root}/bin:/usr/bin:/bin", "HOME": str(root), **env}


def launch(
    root: Path, *flags: str, script: str = "torchrun.sh", **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"{root}/launch/{script}", *flags],
        env=environment(root, env),
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
    )


def call(root: Path, rank: int = 0) -> list[str]:
    return (root / f"call.{rank}").read_text().splitlines()


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


# --- rendezvous.py ---


@pytest.mark.parametrize(("node_list", "hosts"), NODE_LISTS)
def test_a_node_list_is_read_without_scontrol(
    node_list: str, hosts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hosts_of(node_list) == parse_hosts(node_list) == hosts


def test_scontrol_decides_where_it_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    put(tmp_path / "bin" / "scontrol", SCONTROL, tmp_path)
    assert hosts_of("n[1-2]") == ["by-scontrol", "other"]
    assert (tmp_path / "scontrol").read_text() == "show hostnames n[1-2]\n"
    put(tmp_path / "bin" / "scontrol", "#!/bin/sh\nexit 1\n", tmp_path)
    assert hosts_of("n[1-2]") == ["n1", "n2"]


@pytest.mark.parametrize(
    ("low", "high"), [(32768, 60999), (15000, 65535), (1024, 40000), (10000, 25000), (4000, 65000)]
)
def test_the_port_of_a_job_is_free_of_connections_and_its_neighbours(low: int, high: int) -> None:
    ports = [port_of(job_id, low, high) for job_id in range(7_000_000, 7_001_000)]
    assert all(1024 <= port < 65536 and not low <= port <= high for port in ports)
    assert len(set(ports)) == 1000
    assert 29500 not in ports


def test_a_range_that_leaves_nothing_free_still_gives_a_port() -> None:
    assert 1024 <= port_of(123_456_789, 1024, 65535) < 65536


def test_the_meeting_point_is_the_first_host_of_the_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    jobs = {"SLURM_JOB_NODELIST": "n[3-4]"}
    assert address_of(jobs) == address_of({**jobs, "MASTER_ADDR": "n3"}) == "n3"
    for other in ("n4", "login", "127.0.0.1"):
        with pytest.raises(ValueError, match=f"MASTER_ADDR is {other}, .* first host is n3"):
            address_of({**jobs, "MASTER_ADDR": other})


def test_another_address_of_the_first_host_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Here(socket.socket):
        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.3", 1

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(socket, "create_server", lambda address: Here())
    assert address_of({"SLURM_JOB_NODELIST": "n[3-4]", "MASTER_ADDR": "n3-ib"}) == "n3-ib"


# --- torchrun.sh ---


def test_one_node_trains_with_one_process_and_passes_every_flag_through(tree: Path) -> None:
    flags = ["--config", "a b.yaml", "--run.name", "*", "--data.path", ""]
    assert launch(tree, *flags).returncode == 0
    assert call(tree) == [
        *(f"{tree}/launch/elastic.py", "--standalone", "--nproc-per-node", "1"),
        f"{tree}/launch/pretrain_gpt.py",
        *flags,
        "OMP_NUM_THREADS=1",
    ]


def test_the_exit_code_is_that_of_the_run(tree: Path) -> None:
    assert launch(tree, FAKE_CODE="75").returncode == 75


@pytest.mark.parametrize(
    ("env", "nproc"),
    [
        ({"NPROC": "3"}, "3"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "4"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8a,GPU-9b"}, "2"),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "NPROC": "1"}, "1"),
    ],
)
def test_there_is_a_process_for_each_visible_gpu_or_as_many_as_asked(
    tree: Path, env: dict[str, str], nproc: str
) -> None:
    assert launch(tree, **env).returncode == 0
    assert value_of(call(tree), "--nproc-per-node") == nproc


def test_gpus_are_counted_by_nvidia_smi(tree: Path) -> None:
    put(
        tree / "bin" / "nvidia-smi", "#!/bin/sh\nprintf 'GPU 0: A\\n  MIG 1g\\nGPU 1: B\\n'\n", tree
    )
    assert launch(tree).returncode == 0
    assert value_of(call(tree), "--nproc-per-node") == "2"
    put(tree / "bin" / "nvidia-smi", "#!/bin/sh\necho no driver\nexit 9\n", tree)
    assert launch(tree).returncode == 0
    assert value_of(call(tree), "--nproc-per-node") == "1"


def test_threads_are_limited_only_without_gpus_and_only_if_nobody_said(tree: Path) -> None:
    for env, shown in (
        ({}, "1"),
        ({"OMP_NUM_THREADS": "6"}, "6"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "unset"),
    ):
        assert launch(tree, **env).returncode == 0
        assert call(tree)[-1] == f"OMP_NUM_THREADS={shown}"


def test_without_an_environment_of_its_own_it_takes_python3(tree: Path) -> None:
    (tree / "bin").mkdir()
    shutil.move(tree / ".venv" / "bin" / "python", tree / "bin" / "python3")
    assert launch(tree, "--config", "x").returncode == 0
    assert call(tree)[-2] == "x"


NODES = {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "21999"}


def test_a_node_of_several_meets_the_others_at_the_given_place(tree: Path) -> None:
    assert launch(tree, **NODES).returncode == 0
    words = call(tree, rank=3)
    assert "--standalone" not in words
    for flag, value in (("--nnodes", "4"), ("--node-rank", "3"), ("--master-port", "21999")):
        assert value_of(words, flag) == value
    assert value_of(words, "--master-addr") == "localhost"


def test_a_job_may_have_from_fewer_to_more_nodes(tree: Path) -> None:
    assert launch(tree, **{**NODES, "NNODES": "1:4"}).returncode == 0
    assert value_of(call(tree, rank=3), "--nnodes") == "1:4"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"NODE_RANK": ""}, "NODE_RANK is not set"),
        ({"NODE_RANK": "4"}, "one of 0 to 3"),
        ({"NODE_RANK": "-1"}, "one of 0 to 3"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "no-such-host.invalid, which this node cannot"),
        ({"NNODES": "0"}, "NNODES is '0'"),
        ({"NNODES": "4:"}, "NNODES is ''"),
        ({"NNODES": "4:2"}, "first number is the smaller"),
        ({"NPROC": "two"}, "NPROC is 'two'"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}, "srun --ntasks-per-node=1"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "8"}, "8 nodes but NNODES is 4"),
    ],
)
def test_a_setting_that_cannot_work_is_named_before_anything_starts(
    tree: Path, change: dict[str, str], message: str
) -> None:
    done = launch(tree, **{**NODES, **change})
    assert done.returncode == 2 and message in done.stderr
    assert not list(tree.glob("call.*"))


def test_a_port_that_is_taken_is_named_with_its_variable(tree: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = launch(tree, **{**NODES, "MASTER_PORT": port, "NODE_RANK": "0"})
        assert done.returncode == 2
        assert f"port {port}" in done.stderr and "set MASTER_PORT" in done.stderr
        other = launch(tree, **{**NODES, "MASTER_PORT": port, "NODE_RANK": "1"})
    assert other.returncode == 0, "on another node the port says nothing"


# --- slurm.sbatch ---

JOB = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "localhost,n7",
    "SLURM_CPUS_ON_NODE": "8",
}


@pytest.fixture
def cluster(tree: Path) -> Path:
    for name, text in (("srun", SRUN), ("scancel", SCANCEL)):
        put(tree / "bin" / name, text, tree)
    put(tree / "bin" / "scontrol", SCONTROL.replace("by-scontrol", "localhost"), tree)
    return tree


def submit(root: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    # Slurm runs a copy of the script from elsewhere.
    copy = root.parent / "launch" / "slurm_script"
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(root / "launch" / "slurm.sbatch", copy)
    env = {**JOB, "SLURM_SUBMIT_DIR": str(root), **env}
    return subprocess.run(
        ["bash", str(copy), *flags],
        env=environment(root, env),
        cwd=root.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_job_starts_one_launcher_a_node_and_all_meet_at_the_first_host(cluster: Path) -> None:
    flags = ["--config", "a b.yaml", "--run.name", "*"]
    done = submit(cluster, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    options = (cluster / "srun").read_text().splitlines()
    for option in ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8"):
        assert option in options
    for rank in (0, 1):
        words = call(cluster, rank)
        assert value_of(words, "--node-rank") == str(rank)
        assert value_of(words, "--master-addr") == "localhost"
        assert value_of(words, "--master-port") == "21234"
        assert words[-5:-1] == flags
    assert not (cluster / "scontrol").read_text().count("requeue")


def test_the_cores_that_the_job_asked_for_reach_the_task(cluster: Path) -> None:
    assert submit(cluster, SLURM_CPUS_PER_TASK="3").returncode == 0
    assert "--cpus-per-task=3" in (cluster / "srun").read_text().splitlines()


def test_a_job_on_one_node_needs_no_meeting_point(cluster: Path) -> None:
    assert submit(cluster, SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="n7").returncode == 0
    assert "--standalone" in call(cluster)
    assert not (cluster / "scontrol").exists()


def test_a_job_that_cannot_meet_fails_before_it_starts_tasks(cluster: Path) -> None:
    done = submit(cluster, MASTER_ADDR="login.invalid")
    assert done.returncode == 2
    assert "login.invalid" in done.stderr and "localhost" in done.stderr
    assert not (cluster / "srun").exists()


def test_a_job_from_elsewhere_is_told_where_to_submit(cluster: Path) -> None:
    done = submit(cluster, SLURM_SUBMIT_DIR=str(cluster.parent))
    assert done.returncode == 2 and "repository's root" in done.stderr


def test_a_job_that_fails_is_not_requeued(cluster: Path) -> None:
    done = submit(cluster, FAKE_CODE="1", SLURM_JOB_NUM_NODES="1")
    assert done.returncode == 1 and not (cluster / "scontrol").exists()


def signalled(root: Path, number: signal.Signals, **env: str) -> tuple[int, str, str]:
    """The exit code of a job that is signalled while it runs, and its calls of the tools."""
    env = {**JOB, "SLURM_JOB_NUM_NODES": "1", "FAKE_WAIT": "1", "FAKE_CODE": "75", **env}
    script = subprocess.Popen(
        ["bash", f"{root}/launch/slurm.sbatch"], env=environment(root, env), cwd=root
    )
    try:
        while not (root / "started").exists():
            assert script.poll() is None
            time.sleep(0.01)
        script.send_signal(number)
        if number == signal.SIGTERM:
            (root / "stop").touch()
        code = script.wait(30)
    finally:
        script.kill()
        script.wait()
    found = [root / name for name in ("scontrol", "scancel")]
    scontrol, scancel = (path.read_text() if path.exists() else "" for path in found)
    return code, scontrol, scancel


def test_a_job_whose_time_is_nearly_up_is_stopped_and_requeued_once(cluster: Path) -> None:
    code, scontrol, scancel = signalled(cluster, signal.SIGUSR1)
    # The script that has asked for it is there until Slurm ends it.
    assert (code, scontrol, scancel) == (75, "requeue 1234\nended\n", "--signal=USR1 1234\n")


def test_a_task_of_an_array_is_requeued_without_its_array(cluster: Path) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "7"}
    _, scontrol, scancel = signalled(cluster, signal.SIGUSR1, **array)
    assert (scontrol, scancel) == ("requeue 1234_7\nended\n", "--signal=USR1 1234_7\n")


def test_a_job_that_was_done_when_its_time_was_up_is_not_requeued(cluster: Path) -> None:
    code, scontrol, _ = signalled(cluster, signal.SIGUSR1, FAKE_CODE="0")
    assert (code, scontrol) == (0, "")


def test_a_job_that_failed_when_its_time_was_up_is_not_requeued(cluster: Path) -> None:
    code, scontrol, _ = signalled(cluster, signal.SIGUSR1, FAKE_CODE="1")
    assert (code, scontrol) == (1, "")


def test_a_job_that_slurm_ends_is_not_requeued_by_us(cluster: Path) -> None:
    code, scontrol, scancel = signalled(cluster, signal.SIGTERM)
    assert (code, scontrol, scancel) == (75, "show job 1234\n", "")
