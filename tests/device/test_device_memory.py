"""The memory that ``fedsim describe`` prints is that of the tensors which live on a simulated GPU, within 10 %."""

import csv

import pytest

from living import counted

ADAM = "--model.client.optimizer=torch.optim.Adam"
THREE = "--data.source.init_args.clients=3"
FITS = {
    "totals, momentum": ["fedavg"],
    "no moments": ["fedavg", "--model.client.optimizer=torch.optim.SGD", "--model.client.optimizer.init_args.lr=0.01"],
    "server's moments, two moments": ["fedadam", ADAM],
    "kept moments": ["local", ADAM],
    "extras, controls": ["scaffold"],
    "frozen models": ["moon"],
    "a second model that trains": ["ska"],
    "personal models": ["ditto"],
    "a mixture of two models": ["apfl"],
    "weights beside perturbed ones": ["fedsam"],
    "tensors beside models": ["dacs", "--model.method.init_args.first_styled_round=0"],
    "masks": ["subfedavg"],
    "a table of styles, and restyled images": ["stylebank"],
    "texts and their tower": ["text_anchors"],
    "a guide beside norms that stay": ["gperxan", "--model.backbone.init_args.norm=xan"],
    "a model that the server trains": ["fedavg", "--model.aggregation=FLTrust", "--data.public=town2", THREE],
    "uploads for a rule": ["fedavg", "--model.aggregation=Median"],
    "a memory of people": ["sscu"],
    "states on the host": ["moon", "--model.client_store=host", "--data.cache=host"],
    "micro-batches": ["fedavg", "--model.client.micro_batch=4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FITS)
def test_what_lives_beside_a_batch(name, tmp_path):
    seen = counted(tmp_path / "run", *FITS[name])
    assert seen.described.lasting == pytest.approx(seen.step, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_a_batch_keeps_for_its_backward_pass(precision, tmp_path):
    seen = counted(tmp_path / "run", "fedavg", precision=precision)
    assert seen.described.activations == pytest.approx(seen.backward - seen.between, rel=0.1)


@pytest.mark.slow
def test_each_round_logs_the_peak_of_its_gpu(tmp_path):
    seen = counted(tmp_path / "run", "fedavg")
    with (tmp_path / "run" / "metrics.csv").open() as file:
        peaks = [float(row["memory/peak_gib"]) * 2**30 for row in csv.DictReader(file) if row["memory/peak_gib"]]
    assert len(peaks) == 2
    assert max(peaks) == pytest.approx(seen.start + max(seen.step, seen.backward), rel=0.1)
