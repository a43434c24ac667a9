"""Every component with deterministic algorithms on a simulated GPU: nothing is refused, and the bits are the CPU's."""

from typing import get_args, get_type_hints

import pytest
import torch
from safetensors.torch import load_file

import others
import simulated
from fedsim.__main__ import main
from fedsim.federation.components.attacks import Attack
from fedsim.federation.components.collusion import Collusion
from fedsim.federation.components.robust import Aggregation
from fedsim.federation.components.timing import Timing
from fedsim.models import StyleLayers
from kinds import kinds_of
from runs import differences, fit, judged_in_two_steps
from small_generators import STEPS, WIDTHS

LIAR = "--model.attack.attackers=[town0]"
THREE = "--data.source.init_args.clients=3"
HARDWARE = "--model.hardware={down_mbit: 100, up_mbit: 20, images_per_second: 300}"
RESNET = "--model.backbone={{class_path: ResNet, init_args: {{depth: 18, {}}}}}"
ATTACKS = {
    "ALIE": ["--model.attack.z=1.0"], "Backdoor": ["--model.attack.patch=4"], "GaussianNoise": [], "InnerProduct": [],
    "LabelFlip": ["--data.labels=common", "--data.val=none"],
    "MinMax": [], "MinSum": ["--model.attack.direction=sign"], "ModelReplacement": [], "SignFlip": [],
}  # fmt: skip
RULES = {
    "Bucketing": ["--model.aggregation.rule=Median"], "CentredClipping": ["--model.aggregation.bound=0.5"],
    "NearestNeighbourMixing": ["--model.aggregation.rule=Median"],
    "Bulyan": ["--model.aggregation.bad=0"], "GeometricMedian": [], "Krum": ["--model.aggregation.bad=0"], "Median": [],
    "FLTrust": ["--data.public=town2"], "NormClipping": ["--model.aggregation.bound=0.5"], "TrimmedMean": [],
}  # fmt: skip
COMPONENTS = {
    **{name: ["fedavg", f"--model.attack={name}", LIAR, *more] for name, more in ATTACKS.items()},
    **{name: ["fedavg", f"--model.aggregation={name}", THREE, *more] for name, more in RULES.items()},
    "Buffered": ["fedpav", HARDWARE, "--model.timing=Buffered", "--model.timing.buffer=1"],
    "Deadline": ["fedavg", HARDWARE, "--model.timing=Deadline", "--model.timing.seconds=60"],
    "Buffered APFL": ["apfl", HARDWARE, "--model.timing=Buffered", "--model.timing.buffer=1"],
    "mix": ["fedavg", "--model.backbone.init_args.style={kind: mix, after: [layer1]}"],
    "cross": ["fedavg", "--model.backbone.init_args.style={kind: cross, crop: both, after: [input, layer1]}"],
    "snr": [
        "fedavg", "--model.backbone.init_args.style={kind: snr, after: [layer1, layer2]}",
        "--model.objective.causality={form: entropy, weights: [0.1, 0.5]}",
    ],
    "standardise": ["fedpav", "--model.backbone.init_args.style={kind: standardise, after: [input]}"],
    "diversify": ["fedpav", "--model.backbone.init_args.style={kind: diversify, p: 1.0}"],
    "GPerXAN": ["gperxan", "--model.backbone.init_args.norm=xan"],
    "SSCU with SNR": ["sscu", "--model.backbone.init_args.style={kind: snr, after: [layer1]}"],
    "IBN": ["fedavg", RESNET.format("ibn: true")],
    "channels last": ["fedavg", RESNET.format("fam: mscam"), "--model.client.channels_last=true"],
}  # fmt: skip


def test_each_attack_rule_timing_and_style_layer_has_a_fit():
    assert kinds_of(Attack) - {"UploadAttack"} == {*ATTACKS} > kinds_of(Collusion) != set()
    assert kinds_of(Aggregation) == {*RULES}
    assert kinds_of(Timing) - {"Synchronous"} <= {*COMPONENTS}
    words = " ".join(word for words in COMPONENTS.values() for word in words)
    assert {kind for kind in get_args(get_type_hints(StyleLayers)["kind"]) if f"kind: {kind}" not in words} == {"none"}


@pytest.mark.slow
@pytest.mark.parametrize("name", others.each_third(COMPONENTS))
def test_the_bits_are_those_of_the_cpu(name, tmp_path):
    method, *more = COMPONENTS[name]
    with simulated.cuda(1):
        found = fit(tmp_path / "gpu", method, *more, gpus=1, deterministic=True)
    assert differences(found, fit(tmp_path / "cpu", method, *more, deterministic=True)) == []


@pytest.mark.slow
def test_a_generator_is_that_of_the_cpu(tmp_path):
    (tmp_path / "data.yaml").write_text(
        "data: {source: {class_path: SyntheticReID, init_args: {clients: 1, unseen: 1, scale: 0.2}}, size: [32, 16]}\n"
    )
    left = {}
    torch.use_deterministic_algorithms(True)
    try:
        for device in ("cpu", "cuda"):
            where = ["--config", tmp_path / "data.yaml", "--output", tmp_path / device, "--device", device]
            with judged_in_two_steps(), simulated.cuda(1):
                assert main([str(word) for word in ("augment", "fit", *where, *STEPS, *WIDTHS)]) == 0
            left[device] = load_file(tmp_path / device / "town0" / "generator.safetensors")
    finally:
        torch.use_deterministic_algorithms(False)
    assert differences((left["cpu"], []), (left["cuda"], [])) == []
