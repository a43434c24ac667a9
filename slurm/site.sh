# shellcheck shell=bash
# The settings of your cluster, in one place. Source it once in the shell from which you submit (". slurm/site.sh":
# sbatch reads SBATCH_*); every script here sources it again within the job.

# export SBATCH_PARTITION=gpu
# export SBATCH_ACCOUNT=my-project
# export SBATCH_GPUS_PER_NODE=4        # as many as tasks per node: one rank per GPU

# module load cuda

# The environment that `make setup` made, unless another one is active.
if [[ -z "${VIRTUAL_ENV:-}" && -f .venv/bin/activate ]]; then
    # shellcheck disable=SC1091
    source .venv/bin/activate
fi

# Every step ends when one of its ranks fails. Add what your site needs, for example --mpi=none or --cpu-bind=cores.
# shellcheck disable=SC2034
FEDSIM_SRUN=(srun --kill-on-bad-exit=1)

# fedsim in a container: one of the two lines for srun.
# FEDSIM_SRUN+=(apptainer exec --nv --bind "$PWD" fedsim.sif)
# FEDSIM_SRUN+=(--container-image="$PWD/fedsim.sqsh" --container-mounts="$PWD:$PWD" --container-workdir="$PWD")  # Pyxis

# Ends the job with fedsim's exit code. Code 138 is 128 + SIGUSR1: the time was up. fedsim asks Slurm to start the job again,
# unless it runs in a container, or the signal came before it could listen. So Slurm is asked here, too: a second request
# changes nothing.
# export FEDSIM_REQUEUE=no             # together with Preemption's requeue: false
end_job() {
    if [[ "$1" == 138 && "${FEDSIM_REQUEUE:-yes}" != no ]]; then
        # of an array only this task
        job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
        echo "job $job: its time is up; Slurm is asked to start it again" >&2
        scontrol requeue "$job" || true
    fi
    exit "$1"
}

# The data of a job of many small files are read faster from a node's own disk, if there is one. One task per node copies:
# srun --ntasks-per-node=1 tar -xf data.tar -C "$SLURM_TMPDIR"     # then: --data.source.root "$SLURM_TMPDIR/data"
# A folder there is also a place for decoded images: --data.cache_dir "$SLURM_TMPDIR/decoded"

# Since Slurm 22.05 srun does not take this from sbatch.
if [[ -n "${SLURM_CPUS_PER_TASK:-}" ]]; then
    export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
fi

# Ranks meet at the first node's name, which must resolve on all nodes. If it does not, export its address:
# export MASTER_ADDR=...
# The network between nodes, if the default route is another one:
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

# Out of memory although gigabytes are reserved: memory is fragmented. This lets torch grow its blocks instead.
# export PYTORCH_ALLOC_CONF=expandable_segments:True
# NCCL 2.30 and later: several ranks of one GPU, such as MIG slices bound to tasks, without ranks_per_device.
# export NCCL_MULTI_RANK_GPU_ENABLE=1
