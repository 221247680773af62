"""Runs as launchers start them: two torchrun agents as two nodes, ranks that die and come back, accelerate, run.sh."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from nodes import ROOT, agents, environment, free_port
from toydata import SIZES, command, flags, write_folder
from toyruns import assert_same_end

from modelcenter._paths import scripts_dir
from modelcenter.training.config import ClassificationConfig

MODULE = ["-m", "modelcenter", "finetune", "classification"]
DROPPED = {"model_config": SIZES | {"dropout": 0.3, "attention_dropout": 0.3}}
DIES = """
import os, signal
from modelcenter.training import loop

take = loop.Run.train_step

def train_step(self, batch):
    if batch.step == 5 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return take(self, batch)

loop.Run.train_step = train_step
from scripts.finetune_classification import main
main()
"""


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27)


def words(folder, name, **changes):
    """A run of 8 steps, with dropout and a checkpoint at every second one, on 2 ranks."""
    values = {"output_dir": str(folder / name), "epochs": 2, "save_every": 2, "batch_size": 4, **DROPPED}
    return command(flags(folder, **values | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run on one node of two ranks that the others are compared with."""
    folder = write_folder(tmp_path_factory.mktemp("whole"), train=27)
    (one,) = agents(folder, "c10d", [MODULE + words(folder, "whole")], ranks=2)
    assert one.code == 0, one.err
    return folder


def assert_same_run(folder, name, whole):
    (folder / "whole").symlink_to(whole / "whole")
    assert_same_end(folder, name)


@pytest.mark.full
def test_two_nodes_are_two_ranks_of_one(folder, whole):
    """Each node has a home, caches and temporary files of its own; the output folder is shared."""
    ended = agents(folder, "static", [MODULE + words(folder, "run")] * 2)
    assert [node.code for node in ended] == [0, 0], ended
    assert_same_run(folder, "run", whole)
    assert_two_nodes(folder, ended)


def assert_two_nodes(folder, ended):
    assert sorted(node.out.count("step 8/8") for node in ended) == [0, 3]  # rank 0 alone speaks
    for number in range(2):  # each node has tokenised once, for itself
        cached = list((folder / f"node{number}" / ".cache" / "modelcenter" / "tokens").glob("*/about.json"))
        assert len(cached) == 2  # the training and the evaluation rows


@pytest.mark.full
def test_output_folders_that_are_not_shared_are_an_error(folder):
    """A relative name is another folder on each node. torchrun may end the second one before it says so, too."""
    ended = agents(folder, "c10d", [MODULE + words(folder, "run", output_dir="private")] * 2)
    assert all(node.code for node in ended)
    said = [node.errors for node in ended]
    assert max(map(len, said)) == 1, said
    for line in sum(said, []):
        assert "rank 1 on " in line and "storage that all nodes share" in line
    assert not [path for i in range(2) for path in (folder / f"node{i}" / "cwd").rglob("*") if path.is_file()]


@pytest.mark.full
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_killed_rank_is_started_again_and_the_run_goes_on(folder, whole, nodes):
    """Nodes that meet over c10d, too, are two ranks of one."""
    script = folder / "dies.py"
    script.write_text(DIES, encoding="utf-8")
    ended = agents(folder, "c10d", [[str(script), *words(folder, "run")]] * nodes, ranks=2 // nodes, restarts=1)
    assert [node.code for node in ended] == [0] * nodes, ended
    out = "".join(node.out for node in ended)  # the agent with the lower process id has rank 0: numbers may start again
    assert "continuing after step 4" in out or "continuing after step 2" in out
    assert_same_run(folder, "run", whole)
    if nodes == 2:
        assert_two_nodes(folder, ended)


LAUNCH = scripts_dir() / "launch"


def start(folder, words, **env):
    """A command at home in folder/home, with this Python's programs. A variable that is None is not set."""
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = environment(folder / "home", PATH=path, **env)
    env = {name: value for name, value in env.items() if value is not None}
    (folder / "cwd").mkdir(exist_ok=True)
    return subprocess.Popen(  # noqa: S603
        words, cwd=folder / "cwd", env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(process, timeout=240):
    out, _ = process.communicate(timeout=timeout)
    return process.returncode, out


def without_output(values):
    at = values.index("--output_dir")
    return values[:at] + values[at + 2 :]


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_accelerate_starts_the_command(folder, whole, processes):
    """Several processes on a CPU: --cpu would start one, or need mpirun."""
    many = ["--multi_gpu"] if processes > 1 else []
    launch = [sys.executable, "-m", "accelerate.commands.launch", *many, "--num_processes", str(processes)]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--main_process_port", str(free_port())]
    code, out = end(start(folder, [*launch, *MODULE, *words(folder, "run", batch_size=8 // processes)]))
    assert code == 0, out
    if processes == 2:
        assert_same_run(folder, "run", whole)
    else:
        assert "8 steps of 8 rows on 1 rank" in out


@pytest.mark.full
def test_run_sh_says_what_to_do_next(folder, whole):
    """75 for a run that was stopped by its time; the same command goes on, to the same end."""
    command = without_output(words(folder, "run"))
    run = [str(LAUNCH / "run.sh"), "finetune", "classification", *command]
    env = {"OUTPUT_DIR": str(folder / "run"), "NPROC": "2"}
    code, out = end(start(folder, [*run, "--max_time", "0.01s"], **env))
    assert code == 75, out
    assert not (folder / "run" / "model").exists()
    code, out = end(start(folder, run, **env))
    assert code == 0 and "continuing after step 1" in out, out
    assert_same_run(folder, "run", whole)
    code, out = end(start(folder, [*run[:3], *command, "--train_data", "nowhere.tsv"], **env | {"OUTPUT_DIR": "other"}))
    assert code not in (0, 75) and "error: nowhere.tsv: no such file or directory" in out, out


@pytest.mark.full
def test_run_sh_passes_a_signal_on(folder):
    run = [str(LAUNCH / "run.sh"), "finetune", "classification"]
    process = start(folder, [*run, *without_output(words(folder, "run", epochs=5000))], OUTPUT_DIR=str(folder / "run"))
    ends = time.monotonic() + 120
    while not (folder / "run" / "metrics.jsonl").exists() and time.monotonic() < ends:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, out = end(process)
    assert code == 75, out
    assert "stopped by SIGTERM" in (folder / "run" / "summary.json").read_text()


def run_sh(folder, signalled, before, after, code, **env):
    """(exit code, output) of run.sh with a program in place of torchrun, and summaries before and after it."""
    for name in ("bin", "run"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "bin" / "torchrun").write_text(TORCHRUN)
    (folder / "bin" / "torchrun").chmod(0o755)
    if before:
        (folder / "run" / "summary.json").write_text(f'{{"status": "{before}"}}')
    env = {"OUTPUT_DIR": str(folder / "run"), "NPROC": "1", "AFTER": after, "CODE": str(code)} | env
    process = start(folder, [str(LAUNCH / "run.sh"), "finetune"], SIGNAL="TERM" if signalled else "", **env)
    ends = time.monotonic() + 30
    while not (folder / "run" / "started").exists() and time.monotonic() < ends:
        time.sleep(0.02)
    if signalled:
        process.send_signal(signal.SIGTERM)
    return end(process, timeout=30)


TORCHRUN = """#!/usr/bin/env bash
end() {
  if [ -n "$AFTER" ]; then echo "{\\"status\\": \\"$AFTER\\"}" >"$OUTPUT_DIR/summary.json"; fi
  echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds $RANKS"
  exit "$CODE"
}
trap end TERM
RANKS=$(sed 's/.*--nproc_per_node \\([0-9]*\\).*/\\1/' <<<"$*")
touch "$OUTPUT_DIR/started"
[ -n "$SIGNAL" ] || end
while :; do sleep 0.02; done
"""


@pytest.mark.parametrize(
    "signalled, before, after, code, expected",
    [
        (True, "stopped", "stopped", 1, 75),
        (True, "stopped", "", 1, 75),  # killed before it had saved, or the signal came while the model was loaded
        (True, "failed", "", 1, 75),
        (True, "", "finished", 1, 0),  # while model/ was written
        (True, "finished", "finished", 1, 1),  # refused, as the folder holds a finished run
        (True, "", "failed", 1, 1),
        (False, "stopped", "finished", 0, 0),
        (False, "", "finished", 1, 1),  # the model could not be pushed
        (False, "stopped", "", 1, 1),
        (False, "", "", 0, 1),
    ],
)
def test_run_sh_tells_signals_from_failures(tmp_path, signalled, before, after, code, expected):
    assert run_sh(tmp_path, signalled, before, after, code) == (expected, "110 seconds 1\n")


@pytest.mark.parametrize("signalled, expected", [(False, 1), (True, 75)])
def test_run_sh_on_another_node_reads_no_old_summary(tmp_path, signalled, expected):
    """Which the first node has not removed yet."""
    found = run_sh(tmp_path, signalled, before="stopped", after="", code=1, NODE_RANK="1")
    assert found == (expected, "110 seconds 1\n")


NVIDIA_SMI = """#!/usr/bin/env bash
[ -n "$GPUS" ] || { echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."; exit 9; }
for i in $(seq "$GPUS"); do echo "GPU $i: NVIDIA H100 80GB HBM3 (UUID: GPU-$i)"; echo "  MIG 1g.10gb Device 0:"; done
"""


@pytest.mark.parametrize(
    "gpus, visible, ranks",
    [("", None, 1), ("0", None, 1), ("8", None, 8), ("8", "0,1,5", 3), ("8", "", 1), ("8", "-1", 1), ("", "0,1", 1)],
)
def test_run_sh_counts_gpus(tmp_path, gpus, visible, ranks):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    env = {"NPROC": "", "GPUS": gpus, "CUDA_VISIBLE_DEVICES": visible}
    assert run_sh(tmp_path, False, before="", after="finished", code=0, **env) == (0, f"110 seconds {ranks}\n")


SRUN = """#!/usr/bin/env bash
echo "srun $*" >>"$HOME/srun.log"
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
  mkdir -p "$HOME/node$node"
  HOME="$HOME/node$node" SLURM_NODEID=$node "$@" &
done
worst=0
for job in $(jobs -p); do
  wait "$job" || worst=$?
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo 127.0.0.1; echo elsewhere; else echo "$@" >>"$HOME/scontrol.log"; fi
"""


@pytest.mark.full
def test_slurm_sbatch_asks_to_be_queued_again(folder, whole):
    """With programs in place of SLURM's that start two nodes here: stopped by its time, requeued, finished."""
    (folder / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    env = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "NPROC": "1"}
    env |= {
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "OUTPUT_DIR": str(folder / "run"),
        "PORT": str(free_port()),
    }
    batch = ["bash", str(LAUNCH / "slurm.sbatch"), "finetune", "classification", *without_output(words(folder, "run"))]
    code, out = end(start(folder, [*batch, "--max_time", "0.01s"], **env))
    log = folder / "home" / "scontrol.log"
    assert code == 75 and log.read_text() == "requeue 17\n", out
    assert " --cpus-per-task=3 bash " in (folder / "home" / "srun.log").read_text()
    code, out = end(start(folder, batch, **env, SLURM_RESTART_COUNT="1"))
    assert code == 0 and log.read_text() == "requeue 17\n", out
    assert_same_run(folder, "run", whole)


def test_what_the_launch_files_say_exists():
    """Flags of torchrun and of the run, variables that run.sh reads, names that must be the same in two places."""
    from torch.distributed.run import get_args_parser

    run = (LAUNCH / "run.sh").read_text(encoding="utf-8")
    known = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    lines = [line for line in run.splitlines() if "torchrun" in line or "meet=(" in line]
    used = set(re.findall(r"(?<![\w-])--[a-z_]+", " ".join(line.split("-m modelcenter")[0] for line in lines)))
    assert "--nproc_per_node" in used and "--rdzv_endpoint" in used and used <= known, used - known

    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = job["spec"]["template"]["spec"]
    (box,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in box["env"]}
    assert set(env) <= set(re.findall(r"\$\{?([A-Z_]+)", run))
    assert env["RDZV"].split(":")[0] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"] and int(env["NNODES"]) == job["spec"]["completions"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    mounted = {mount["name"]: mount["mountPath"] for mount in box["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
    assert Path(env["OUTPUT_DIR"]).is_relative_to(mounted["shared"]) and box["command"] == ["scripts/launch/run.sh"]
    verb, task, *flags_ = box["args"]
    assert (verb, task) == ("finetune", "classification")
    ClassificationConfig.from_args([*(str(ROOT / w) if "/" in w else w for w in flags_), "--output_dir", "x"], None, "")
    given = re.compile(r"SHUTDOWN_TIMEOUT:-(\d+)")  # for a run that is stopped to save, before it is killed
    assert 60 < int(given.findall(run)[0]) < pod["terminationGracePeriodSeconds"]

    batch = (LAUNCH / "slurm.sbatch").read_text(encoding="utf-8")
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", batch, re.M))
    known = "job-name nodes ntasks-per-node gpus-per-node cpus-per-task time signal requeue open-mode"  # of sbatch(1)
    assert set(asked) == set(known.split())
    assert asked["ntasks-per-node"] == "1"  # a torchrun
    reaches, seconds = asked["signal"].split("@")
    assert reaches == "TERM"  # not the shell alone
    assert int(given.findall(batch)[0]) < int(seconds)
    recipe = ROOT / re.findall(r"--config (\S+)", batch)[0]
    ranks = int(asked["nodes"]) * int(asked["gpus-per-node"])
    assert ClassificationConfig.from_yaml(recipe).accumulation(ranks) >= 1
