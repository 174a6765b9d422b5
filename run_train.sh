#!/usr/bin/env bash
# Train a model: find or make the Python environment, then hand over to torchtitan_lite/tools/launch.py.
set -euo pipefail

print_help() {
    cat <<'HELP'
Usage: ./run_train.sh [--config NAME_OR_PATH] [--section.key value]...

  ./run_train.sh                                        configs/debug.toml on what this machine has
  ./run_train.sh --config llama3_8b.toml                a bare name in configs/, or the path of a TOML file
  ./run_train.sh --config debug --training.steps 20     every further argument overrides a key of the config
  python -m torchtitan_lite check --keys [SECTION]      prints every key: type, meaning, default
  NGPU=8 ./run_train.sh --config debug_3d               8 ranks on this host, on GPUs or CPUs

What it does: takes the Python on the PATH if that has the packages of pyproject.toml, else makes .venv here once;
refuses a config that cannot work, as `python -m torchtitan_lite check` does; encodes a named corpus once; starts one
process per rank with torchrun; exports the last checkpoint if checkpoint.last_save_in_hf. The working directory stays
the caller's. Exit status: 0 trained, 2 refused by check, 130 stopped by Ctrl-C, 143 stopped by SIGTERM, 1 otherwise.

Ctrl-C or SIGTERM, to any process of the run: all ranks finish a step, save it if checkpoint.enable, print the command
that continues, and end. One signal may arrive many times within 5 s (timeout, systemd and scancel reach every process):
that counts as one, and so does a second Ctrl-C within 5 s. A signal after the 5 s ends the run at once. So does the
first one before the first step is done, because there is nothing to save.

Environment:
  CONFIG_FILE    the same as --config, which wins over it
  NGPU           ranks on each host; default: all GPUs; on a CPU the product of the config's degrees, else 2
  LOG_RANK       ranks of this host whose output is shown (default 0; 0,1 for two). If a rank fails, the stderr of the
                 others is kept, in a folder that is named at the end
  MAX_RESTARTS   how often torchrun restarts all ranks after a failure (default 0). With --checkpoint.enable a
                 restarted run resumes the newest complete checkpoint
  PYTHON         the Python to begin with (default python3; 3.10 or newer)
  OMP_NUM_THREADS, GLOO_SOCKET_IFNAME   default to 1 thread per rank, and on a single host to the loopback
  PYTORCH_ALLOC_CONF   for GPUs; default expandable_segments:True, unless PYTORCH_CUDA_ALLOC_CONF is set
  PIP_*          settings of pip for the set-up. On Linux the default torch is NVIDIA's, of several GB: for a machine
                 without a GPU set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds

Several hosts: start the same command on each, with
  NNODES         number of hosts
  NODE_RANK      0 on the host that MASTER_ADDR names, another number on each of the others; torchrun numbers the
                 ranks by host name
  MASTER_ADDR    name or address of that host
  MASTER_PORT    a free port there (default 29500)
  PET_LOCAL_ADDR    address of this host for the others, if they cannot resolve its name
With Slurm: start it once in an allocation of several nodes; it starts itself on each node by srun. NNODES=1 keeps it on
one. assets/slurm/train.sbatch does that, and continues a run in further jobs when its time is over.
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
[[ -f $repository/train.py ]] || fail "$repository holds no train.py. Slurm runs a copy of a batch script: use --wrap."

# The Python to train with. A node that srun starts below gets it by PYTHON, and finds nothing left to do.
command -v "${PYTHON:=python3}" >/dev/null || fail "there is no $PYTHON here: set PYTHON=/path/to/python3"
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
PYTHON=$("$PYTHON" -m torchtitan_lite.tools.environment)
export PYTHON

if [[ -z ${NNODES:-} ]]; then
    if ((${SLURM_STEP_NUM_NODES:-1} > 1)); then # srun has started this on each node
        ((${SLURM_STEP_NUM_TASKS:-0} == SLURM_STEP_NUM_NODES)) || fail "start one per node: --ntasks-per-node=1"
        NNODES=$SLURM_STEP_NUM_NODES NODE_RANK=$SLURM_NODEID MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
        MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | sed -n 1p)
    elif ((${SLURM_JOB_NUM_NODES:-1} > 1)); then
        # No --cpus-per-task and no binding: a task here is a whole node, whose ranks torchrun starts.
        exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
            --kill-on-bad-exit=1 bash "$repository/run_train.sh" "$@"
    fi
fi
export NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0} MASTER_ADDR=${MASTER_ADDR:-} MASTER_PORT=${MASTER_PORT:-29500}
[[ $NNODES == 1 || -n $MASTER_ADDR ]] || fail "NNODES=$NNODES needs MASTER_ADDR, the name of the host with NODE_RANK=0"
[[ -z ${CONFIG_FILE:-} ]] || set -- --config "$CONFIG_FILE" "$@" # the last --config wins
# On GPUs, memory grows in segments that never fragment.
[[ -n ${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-} ]] || export PYTORCH_ALLOC_CONF=expandable_segments:True
exec "$PYTHON" -m torchtitan_lite train "$@"
