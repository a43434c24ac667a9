"""A finished run against wrong commands: whatever is refused, early or in the first round, leaves every file of it."""

import random
import shutil

import pytest

import others
from fedsim.__main__ import main
from fedsim.methods import FedPav
from tiny_run import TINY

DRAWS, CHUNK, SOME = 200, 20, 2
ADAMS = ("Adam", "AdamW", "RMSprop", "Adagrad", "NAdam")


class FailsInTraining(FedPav):
    """A method of a user's own, whose fault shows in the first round only."""

    def train(self, client):
        """Refuse."""
        raise ValueError(f"client {client.client_name} cannot train like this")


class FailsAtTheServer(FedPav):
    """As above, after the clients have trained."""

    def weights(self, reports):
        """Refuse."""
        raise ValueError("the server cannot weigh these clients")


def too_many_bad(rng):
    return ["--model.aggregation=Krum", f"--model.aggregation.bad={rng.randint(2, 99)}"]


def too_few_in_a_round(rng):
    few = ["--model.selection=RandomFraction", f"--model.selection.fraction={rng.choice([0.2, 0.25, 0.5])}"]
    return [*few, *rng.choice([["--model.aggregation=Krum"], [
        "--model.aggregation=TrimmedMean", f"--model.aggregation.trim={rng.uniform(0.45, 0.49)}"]])]  # fmt: skip


def all_trimmed(rng):
    return ["--model.aggregation=TrimmedMean", f"--model.aggregation.trim={rng.uniform(0.26, 0.49)}"]


def method_without_its_optimizer(rng):
    return [f"--model.method={rng.choice(['Scaffold', 'FedNova'])}", f"--model.client.optimizer={rng.choice(ADAMS)}"]


def dampened(rng):
    options = [f"--model.method={rng.choice(['Scaffold', 'FedNova'])}", "--model.client.optimizer.momentum=0.9"]
    return [*options, f"--model.client.optimizer.dampening={rng.uniform(0.1, 0.9)}"]


def kept_optimizer(rng):
    return [f"--model.method={rng.choice(['Ditto', 'Scaffold', 'FedNova'])}", "--model.client.optimizer_state=keep"]


def one_epoch(rng):
    own = f"--model.clients.town{rng.randrange(4)}={{local_epochs: 1}}"
    return ["--model.method=SubFedAvg", *rng.choice([[], ["--model.client.local_epochs=3", own]])]


def accumulating(rng):
    own = f"--model.clients.town{rng.randrange(4)}={{accumulate: {rng.randint(2, 9)}}}"
    return ["--model.method=PFedMe", rng.choice([own, f"--model.client.accumulate={rng.randint(2, 9)}"])]


def diverging(rng):
    return [f"--model.client.optimizer.lr=1e{rng.randint(30, 38)}"]


def diverging_client(rng):
    town = "{optimizer: {class_path: torch.optim.SGD, init_args: {lr: 1.0e+30}}}"
    return [f"--model.clients.town{rng.randrange(4)}={town}"]


def out_of_range(rng):
    return [rng.choice(["--model.client.batch_size=1", "--data.val_fraction=2", "--model.neck.dropout=3",
                        "--model.client.optimizer.lr=-1", "--data.size=[2, 2]", "--trainer.precision=16-mixed",
                        "--model.threads=0", "--model.nonsense=1", "--trainer.strategy=ddp"])]  # fmt: skip


def another_model(rng):
    return [rng.choice([f"--model.backbone.width={rng.choice([4, 12, 16])}", f"--model.neck.dim={rng.choice([8, 24])}",
                        "--model.neck.kind=bnneck"])]  # fmt: skip


def another_method(rng):
    names = ["Local", "FedBN", "FedProx", "Scaffold", "FedAtt", "MOON", "PFedMe", "Ditto", "IFCA"]
    return [f"--model.method={rng.choice(names)}"]


def other_data(rng):
    return [rng.choice([f"--data.source.clients={rng.choice([2, 3, 5])}", "--data.val=none",
                        f"--data.source.scale={rng.choice([0.1, 0.5])}"])]  # fmt: skip


def fewer_rounds(rng):
    return ["--trainer.max_epochs=1"]


LATE = [
    too_many_bad, too_few_in_a_round, all_trimmed, method_without_its_optimizer, dampened, kept_optimizer, one_epoch,
    accumulating, diverging, diverging_client, out_of_range,
]  # fmt: skip
OF_ANOTHER = [another_model, another_method, other_data, fewer_rounds]


def draw(number, config, run):
    """A wrong command against a run: its words."""
    rng = random.Random(number)
    way = rng.choice(["replaces", "replaces", "continues", "continues", "continues with a fault", "begins", "scores"])
    more = ["--trainer.max_epochs=4"]
    if way == "replaces":
        return ["fit", "--config", config, "--run_dir", run, "--overwrite=true", *rng.choice(LATE)(rng)]
    if way == "continues":
        fault = rng.choice(OF_ANOTHER)
        return ["fit", "--ckpt_path", run, *more, *fault(rng)]
    if way == "continues with a fault":
        return ["fit", "--ckpt_path", run, *more, *rng.choice(LATE)(rng)]
    if way == "begins":
        return ["fit", "--config", config, "--run_dir", run, *rng.choice([[], ["--ckpt_path=best", *more]]),
                *rng.choice([*LATE, *OF_ANOTHER[:3]])(rng)]  # fmt: skip
    command = rng.choice([["test"], ["test", "--save_ranking"], ["validate"], ["predict"]])
    return [*command, "--ckpt_path", run, *rng.choice(OF_ANOTHER[:3])(rng)]


def content(folder):
    """Every file and folder below a folder, with the bytes of the files."""
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.yaml").write_text(TINY)
    few = ["--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=2"]
    assert main(["fit", "--config", str(folder / "tiny.yaml"), "--run_dir", str(folder / "run"), *few]) == 0
    (folder / "run" / "notes.txt").write_text("the user's own")
    shutil.copytree(folder / "run", folder / "kept")
    return folder


@pytest.fixture
def run(finished):
    yield finished / "run"
    if content(finished / "run") != content(finished / "kept"):
        shutil.rmtree(finished / "run")
        shutil.copytree(finished / "kept", finished / "run")


@pytest.mark.parametrize(
    "chunk", [pytest.param(n, marks=others.unless(n < SOME)) for n in range(DRAWS // CHUNK)]
)  # fmt: skip
def test_a_wrong_command_changes_no_file_of_a_finished_run(finished, run, capsys, chunk):
    before, slips = content(run), []
    for number in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        words = list(map(str, draw(number, finished / "tiny.yaml", run)))
        code = main(words)
        error = capsys.readouterr().err
        if code == 0:
            slips.append((number, "taken", words))
        elif code != 2 or sum(line.startswith("fedsim: error: ") for line in error.splitlines()) != 1:
            slips.append((number, code, words, error))
        if content(run) != before:
            slips.append((number, "changed", words))
            shutil.rmtree(run)
            shutil.copytree(finished / "kept", run)
    assert not slips, "\n".join(map(str, [len(slips), *slips]))


@pytest.mark.parametrize("method", [FailsInTraining, FailsAtTheServer])
@pytest.mark.parametrize("way", ["replaces", "continues"])
def test_a_fault_of_the_first_round_changes_no_file_of_a_finished_run(finished, run, capsys, method, way):
    before = content(run)
    start = {"replaces": ["--config", finished / "tiny.yaml", "--run_dir", run, "--overwrite=true"],
             "continues": ["--ckpt_path", run, "--trainer.max_epochs=4"]}  # fmt: skip
    # a resumed run has the name of its method
    method.__name__ = {"replaces": method.__name__, "continues": "FedPav"}[way]
    with pytest.raises(ValueError, match=r"cannot (train|weigh)"):
        main(list(map(str, ["fit", *start[way], f"--model.method={__name__}.{method.__qualname__}"])))
    assert content(run) == before
