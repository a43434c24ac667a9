#!/usr/bin/env bash
# Four jobs. Each job starts when the job before it has succeeded, and is cancelled when that job has failed:
# describe (are settings and data in order?) -> fit -> test -> report.
#
#   slurm/chain.sh runs/mine --config FILE [options of fedsim fit]
#
# Run it in the repository. Options of sbatch for the fit: FIT_SBATCH="--nodes 2 --ntasks-per-node 4 --gpus-per-node 4".
set -euo pipefail
source slurm/site.sh

if (($# < 2)); then
    echo "usage: slurm/chain.sh RUN_DIR OPTIONS" >&2
    exit 2
fi
run_dir="$1"
shift
read -r -a fit_sbatch <<<"${FIT_SBATCH:-}"

submit() { # SCRIPT or options of sbatch, then the command line; prints the job's number
    local id
    id="$(sbatch --parsable "${after[@]}" "$@")"
    echo "${id%%;*}" # NUMBER;CLUSTER
}

then_() { # the next job starts when job $1 has succeeded
    after=("--dependency=afterok:$1" --kill-on-invalid-dep=yes)
}

after=()
prepare="$(submit --job-name=fedsim-describe slurm/command.sbatch describe "$@")"
then_ "$prepare"
fit="$(submit "${fit_sbatch[@]}" slurm/fit.sbatch "$@" --run_dir "$run_dir")"
then_ "$fit"
test="$(submit --job-name=fedsim-test slurm/command.sbatch test --ckpt_path "$run_dir")"
then_ "$test"
report="$(submit --job-name=fedsim-report slurm/command.sbatch report "$run_dir")"
echo "describe $prepare, fit $fit, test $test, report $report"
