#!/usr/bin/env bash
# Train a model: find or create the Python environment, then start torchtitan_lite/tools/launch.py.
set -euo pipefail

print_help() {
    cat <<'HELP'
Usage: ./run_train.sh [--config NAME_OR_PATH] [--section.key value]...

  ./run_train.sh                                        configs/debug.toml on this machine's GPUs or CPU
  ./run_train.sh --config llama3_8b.toml                a bare name in configs/, or the path of a TOML file
  ./run_train.sh --config debug --training.steps 20     all other arguments override keys of the config
  python3 -m torchtitan_lite check --keys [NAME]        prints every key: type, meaning, default
  NGPU=8 ./run_train.sh --config debug_3d               8 ranks on this host, on GPUs or CPUs

What it does:
  1. uses the Python on the PATH, or .venv here, if it has the packages in pyproject.toml; otherwise creates .venv once
  2. stops if the config is invalid; `python3 -m torchtitan_lite check` makes the same checks
  3. encodes a named corpus once
  4. starts one process per rank with torchrun
  5. exports the last checkpoint if checkpoint.last_save_in_hf is set
The working directory does not change. Exit status: 0 trained, 2 refused by check, 1 failed, 128 + number if a signal
stopped the run: 130 Ctrl-C, 143 SIGTERM.

On Ctrl-C, SIGTERM, SIGQUIT, SIGUSR1 or a closed terminal (SIGHUP), to any process of the run, all ranks finish the
step, save a checkpoint if checkpoint.enable is set, print the command that resumes, and exit. All signals within 5 s
count as one, because timeout, systemd and scancel signal every process. A later signal ends the run immediately. Even
the first signal ends the run immediately if the step hangs. The same holds before the end of the first step, because
there is nothing to save.

Environment:
  CONFIG_FILE    same as --config; --config wins if both are given
  NGPU           ranks per host; default: all GPUs; on a CPU the product of the config's degrees, else 2
  LOG_RANK       ranks of this host whose output is shown (default 0; 0,1 for two). If a rank fails, its traceback is
                 shown, and the last lines name the folder with the output of the other ranks
  MAX_RESTARTS   number of times torchrun restarts all ranks after a failure (default 0). With --checkpoint.enable a
                 restarted run resumes from the newest complete checkpoint
  SAVED_FILE     a file into which the launcher of NODE_RANK=0 writes the path of the newest checkpoint that this start
                 has saved
  TOOL           pulse: measure the ranks and links of this run instead of training
  PYTHON         the Python to start with (default python3; 3.10 or newer)
  OMP_NUM_THREADS    threads per rank (default 1)
  GLOO_SOCKET_IFNAME    network interface that gloo uses (default: the loopback interface on a single host, otherwise
                 the interface that reaches MASTER_ADDR)
  PYTORCH_ALLOC_CONF   for GPUs; default expandable_segments:True, unless PYTORCH_CUDA_ALLOC_CONF is set
  PIP_*          pip settings for creating .venv. On Linux, pip installs torch for CUDA 13, about 5 GB, which needs
                 NVIDIA driver 580. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu126 is for older drivers and
                 GPUs, and https://download.pytorch.org/whl/cpu for CPUs (1 GB)

Several hosts: start the same command on each, with
  NNODES         number of hosts; with 2:4, the run continues on 2 to 4 hosts if hosts are lost or return
                 (assets/slurm/README.md)
  NODE_RANK      0 on the host that MASTER_ADDR names, a different number on every other host; torchrun numbers the
                 ranks by host name
  MASTER_ADDR    name or address of the host with NODE_RANK=0
  MASTER_PORT    a free port on that host (default 29500)
  PET_LOCAL_ADDR    address of this host, if the other hosts cannot resolve its name
Before torchrun starts, the hosts rendezvous at MASTER_ADDR:MASTER_PORT. An error names each host that is missing, or
that was started with a different config, MAX_RESTARTS or version than the other hosts.
With Slurm, start run_train.sh once in an allocation of several nodes. It then starts itself on every node with srun,
unless NNODES=1 is set. assets/slurm/train.sbatch does this, and requeues the job when its time limit is reached.
HELP
}

fail() {
    echo "run_train.sh: $*" >&2
    exit 1
}

for argument in "$@"; do
    if [[ $argument == --help || $argument == -h ]]; then
        print_help
        exit 0
    fi
done

repository=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
[[ -f $repository/train.py ]] || fail "$repository has no train.py. Slurm runs a copy of a batch script: use --wrap."

# The Python to train with. Nodes that srun starts below inherit PYTHON, so they do not set up an environment again.
command -v "${PYTHON:=python3}" >/dev/null || fail "$PYTHON was not found: set PYTHON=/path/to/python3"
# PYTHONSAFEPATH stops Python 3.11 and newer from importing another torchtitan_lite from the working directory.
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
PYTHON=$("$PYTHON" -m torchtitan_lite.tools.environment)
export PYTHON

if [[ -z ${NNODES:-} ]]; then
    if ((${SLURM_STEP_NUM_NODES:-1} > 1)); then # srun started this script on every node
        ((${SLURM_STEP_NUM_TASKS:-0} == SLURM_STEP_NUM_NODES)) || fail "start one per node: --ntasks-per-node=1"
        NNODES=$SLURM_STEP_NUM_NODES NODE_RANK=$SLURM_NODEID MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
        MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | sed -n 1p)
    elif ((${SLURM_JOB_NUM_NODES:-1} > 1)); then
        # A task is a whole node, on which torchrun starts the ranks, so do not set --cpus-per-task or bind CPUs.
        exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
            --kill-on-bad-exit=1 bash "$repository/run_train.sh" "$@"
    fi
fi
export NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0} MASTER_ADDR=${MASTER_ADDR:-} MASTER_PORT=${MASTER_PORT:-29500}
# On GPUs, expandable segments avoid fragmentation of memory.
[[ -n ${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-} ]] || export PYTORCH_ALLOC_CONF=expandable_segments:True
exec "$PYTHON" -m torchtitan_lite "${TOOL:-train}" "$@"
