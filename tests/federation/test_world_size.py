"""The same bits on 1, 2 and 4 ranks: global weights, private states and metrics."""

import csv
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from failing import PATIENCE, Run, finish
from fedsim.strategy.checkpoint_files import read_checkpoint, read_states
from tiny_run import TINY

pytestmark = [pytest.mark.dist, pytest.mark.slow]

# unequal clients, a sample of them, drop-outs, stragglers, dropout, a client with settings of its own
OPTIONS = [
    "--model.selection=RandomFraction",
    "--model.selection.fraction=0.75",
    "--model.availability.drop=0.1",
    "--model.availability.straggle=0.3",
    "--model.clients.town3={local_epochs: 2, batch_size: 4}",
    "--trainer.check_val_every_n_epoch=1",
    "--model.evaluation.batch_size=8",  # several batches per data set, so that ranks can share them
]


def run(tiny, folder, devices, *options, machines=1):
    logs = folder.with_name(f"{folder.name}-logs")
    args = ("--config", tiny, "--run_dir", folder, *OPTIONS, *options)
    finish(Run(logs, "fit", *args, ranks=devices, machines=machines))
    path = folder / "checkpoints" / "last.ckpt"
    checkpoint = read_checkpoint(path)
    content = checkpoint["fedsim"]
    checkpoint["states"] = read_states(path, content, list(content["clients"]))
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return checkpoint, [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    """The run on one rank: what it leaves, and its metrics. Three tests compare others with it."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "tiny.yaml").write_text(TINY)
    return run(folder / "tiny.yaml", folder / "run", 1)


def assert_equal_states(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), f"{key}: {int((a[key] != b[key]).sum())} of {a[key].numel()} entries differ"


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--model.bn_stats=local", "--model.server_optimizer=FedAdam"),
        ("--model.bn_stats=first", "--model.clients.town1={backbone: {class_path: SmallCNN, init_args: {width: 6}}}"),
        (
            "--model.bn_stats=recalibrate",
            "--data.public=new0",
            "--model.client.sampler=identity",
            "--model.objective.triplet=1.0",
        ),
    ],
    ids=["mean", "local-statistics-FedAdam", "first-two-architectures", "recalibrate-triplet"],
)
def test_any_number_of_ranks_gives_the_same_bits(on_one, tiny, tmp_path, options):
    one, rows = run(tiny, tmp_path / "1", 1, *options) if options else on_one
    initial = run(tiny, tmp_path / "0", 1, *options, "--trainer.max_epochs=1")[0]
    moved = [not torch.equal(initial["state_dict"][k], v) for k, v in one["state_dict"].items()]
    assert all(moved), "the runs below would be equal because nothing was trained"
    for devices in (2, 4) if not options else (2,):
        # on one rank sets are scored by one rank, here by all: the numbers do not depend on who computes them
        sharing = "--model.evaluation.share_from=1"
        many, many_rows = run(tiny, tmp_path / str(devices), devices, *options, sharing)
        assert_equal_states(one["state_dict"], many["state_dict"])
        assert one["states"].keys() == many["states"].keys() == {f"town{i}" for i in range(4)}
        for client, state in one["states"].items():
            assert_equal_states(state, many["states"][client])
        assert rows == many_rows


def test_ranks_of_two_machines_give_the_same_bits_as_one(on_one, tiny, tmp_path):
    one, rows = on_one
    four, four_rows = run(tiny, tmp_path / "four", 4, machines=2)
    assert set(four["fedsim"]["hosts"].values()) == {0, 1, 2, 3}
    assert_equal_states(one["state_dict"], four["state_dict"])
    for client, state in one["states"].items():
        assert_equal_states(state, four["states"][client])
    assert rows == four_rows


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the second process in /proc")
def test_the_others_end_when_a_process_is_killed(tiny, tmp_path):
    command = [sys.executable, "-m", "fedsim", "fit", "--config", str(tiny), "--run_dir", str(tmp_path / "run"),
               "--trainer.devices=2", "--trainer.max_epochs=1000", "--trainer.enable_progress_bar=true"]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "NODE_RANK", "PL_", "LOCAL_RANK"))}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as first:
        lines = []
        for line in first.stderr:
            lines.append(line)
            if line.startswith("round 2/"):
                break
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        assert children
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        rest = first.stderr.read()
        assert first.wait(timeout=PATIENCE) != 0
    assert "Traceback" not in rest, rest


def test_a_resumed_run_ends_in_the_same_bits_on_other_ranks(on_one, tiny, tmp_path):
    whole, _ = on_one
    run(tiny, tmp_path / "part", 1, "--trainer.max_epochs=2")
    part = tmp_path / "part" / "checkpoints" / "last.ckpt"
    resumed, _ = run(tiny, tmp_path / "resumed", 2, f"--ckpt_path={part}")
    assert_equal_states(whole["state_dict"], resumed["state_dict"])
    for client, state in whole["states"].items():
        assert_equal_states(state, resumed["states"][client])


# -- ranks that share clients ------------------------------------------------------------------------------------------

# town3 has more to do than all others together
SPANS = ["--model.client.micro_batch=3", "--model.clients.town3={local_epochs: 12, batch_size: 8}"]


def run_with_spans(tiny, folder, devices, *options, machines=1):
    """Run on ranks that are slowed at random; assert that some shared a client, and return the run's results."""
    notes = folder.with_name(f"{folder.name}-notes")
    notes.mkdir()
    slow = ["--trainer.callbacks+=failing.Jitter", f"--trainer.callbacks.folder={notes}"]
    result = run(tiny, folder, devices, *SPANS, *slow, *options, machines=machines)
    visits = Counter(note.name.rpartition(" ")[0] for note in notes.iterdir())
    assert max(visits.values()) > 1, visits
    return result


@pytest.fixture(scope="module")
def in_pieces_on_one(tmp_path_factory):
    """The run on one rank, with batches in pieces."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "tiny.yaml").write_text(TINY)
    return run(folder / "tiny.yaml", folder / "run", 1, *SPANS)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_whoever_is_slow_in_a_span_the_bits_are_the_same(in_pieces_on_one, tiny, tmp_path, ranks):
    one, rows = in_pieces_on_one
    many, many_rows = run_with_spans(tiny, tmp_path / "run", ranks)
    assert_equal_states(one["state_dict"], many["state_dict"])
    for client, state in one["states"].items():
        assert_equal_states(state, many["states"][client])
    assert rows == many_rows


def test_a_run_with_spans_continues_on_other_machines(in_pieces_on_one, tiny, tmp_path):
    """Begun on three ranks, continued on two machines with two ranks each."""
    whole, _ = in_pieces_on_one
    run_with_spans(tiny, tmp_path / "part", 3, "--trainer.max_epochs=1")
    part = tmp_path / "part" / "checkpoints" / "last.ckpt"
    resumed, _ = run_with_spans(tiny, tmp_path / "resumed", 4, f"--ckpt_path={part}", machines=2)
    assert_equal_states(whole["state_dict"], resumed["state_dict"])
    for client, state in whole["states"].items():
        assert_equal_states(state, resumed["states"][client])
