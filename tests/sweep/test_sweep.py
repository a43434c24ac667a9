"""Sweeps: errors in files, samples, and command lines."""

import contextlib
import io
import itertools
import json
import random
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from scipy import stats

import others
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.parsing.config_files import normalise
from fedsim.sweep.file import sweep_of
from fedsim.sweep.made import sweep_of_method
from fedsim.sweep.sampling import command_of, samples
from small import refuse
from sweep_files import read_sweep

ROOT = Path(__file__).parents[2]
METHODS = sorted(path.stem for path in (ROOT / "configs" / "methods").glob("*.yaml"))
OF_SEVERAL_METHODS = {"base", "declared", "pruned", "reference", "restyling"}


# -- the file ----------------------------------------------------------------------------------------------------------

WRONG = [
    ({"method": "grdi"}, "method", "choose from bayes, grid, random"),
    ({"methods": "grid"}, "methods", "choose from command"),
    ({"metric": None}, "metric", "is missing; give its name, such as val/mAP"),
    ({"metric": "val/mAP"}, "metric", "expected names"),
    ({"metric": {"goal": "maximize"}}, "metric.name", "val/mAP"),
    ({"metric": {"name": "x", "goal": "max"}}, "metric.goal", "maximize, minimize"),
    ({"program": None}, "program", "set it to fedsim"),
    ({"run_cap": 0}, "run_cap", "not a number of runs"),
    ({"command": "fedsim fit"}, "command", "a list of words"),
    ({"command": ["fedsim", "fit"]}, "command", "${args} is missing"),
    ({"command": ["fedsim", "${arg}", "${args}"]}, "command", "${arg} is not a known macro"),
    ({"command": ["fedsim", "--run_dir=x", "${args}"]}, "command", "leave --run_dir out"),
    ({"command": ["fedsim", "--overwrite=true", "${args}"]}, "command", "leave --overwrite out"),
    ({"parameters": {"run_dir": {"values": ["x"]}}}, "parameters.run_dir", "leave it out"),
    ({"parameters": {"overwrite": {"value": True}}}, "parameters.overwrite", "leave it out"),
    ({"parameters": None}, "parameters", "expected names"),
    *(
        ({"parameters": {name: {"values": [1]}}}, f"parameters.{name}", "write its name alone, such as model.client.b")
        for name in (
            "--data.val",
            "----data.val",
            "-data.val",
            "---",
            "-",
            "--data.val=1",
            "data.val=none",
            "data.val=",
        )
    ),
    ({"parameters": {"a": 1}}, "parameters.a", "expected names"),
    ({"parameters": {"a": {"vals": [1]}}}, "parameters.a.vals", "choose from distribution, max"),
    ({"parameters": {"a": {"values": []}}}, "parameters.a.values", "at least one"),
    ({"parameters": {"a": {"parameters": {"b": {"value": 1}}}}}, "parameters.a", "a.b.c"),
    ({"parameters": {"a": {"min": 1}}}, "parameters.a.max", "is missing"),
    ({"parameters": {"a": {"min": 0.5, "max": 1.5}}}, "parameters.a", "a grid cannot be made of uniform"),
    ({"parameters": {"a": {"distribution": "beta"}}}, "parameters.a.distribution", "choose from constant"),
    ({"parameters": {"a": {"values": [1, 2], "probabilities": [0.5, 0.6]}}}, "parameters.a.probabilities", "sum"),
    ({"parameters": {"a": {"values": [1, 2], "probabilities": [0.5, 0.5]}}}, "parameters.a", "a grid cannot"),
    ({"parameters": {"a": {"min": "1e-4", "max": 1}}}, "parameters.a.min", "1.0e-4"),
    ({"parameters": {"a": {"min": 2, "max": 1}}}, "parameters.a.max", "not larger than min"),
    ({"parameters": {"a": {"distribution": "int_uniform", "min": 0.5, "max": 1}}}, "parameters.a.min", "an integer"),
    ({"parameters": {"a": {"distribution": "log_uniform_values", "min": 0, "max": 1}}}, "parameters.a.min", "positive"),
    ({"parameters": {"a": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0}}}, "parameters.a.q", "positive"),
    ({"parameters": {"a": {"distribution": "normal", "sigma": 0}}}, "parameters.a.sigma", "positive"),
    ({"parameters": {"a": {"value": 1, "values": [1, 2]}}}, "parameters.a.values", "no such field with constant"),
    ({"parameters": {"a": {"values": [1, 2], "min": 0}}}, "parameters.a.min", "no such field with categorical"),
    ({"parameters": {"a": {"min": 1, "max": 9, "q": 2}}}, "parameters.a.q", "no such field with int_uniform"),
    ({"parameters": {"a": {"values": [float("nan"), 1]}}}, "parameters.a.values", "without .nan"),
    ({"metric": {"name": " "}}, "metric.name", "val/mAP"),
    ({"command": ["fedsim", None, "${args}"]}, "command", "null is no word"),
    ({"command": ["fedsim", " ", "${args}"]}, "command", '" " is no word'),
    ({"early_terminate": {"type": "hyperband", "min_iter": 2, "strict": "maybe"}}, "early_terminate.strict", "true"),
]


@pytest.mark.parametrize(("fields", "field", "remedy"), WRONG, ids=lambda v: json.dumps(v)[:60])
def test_a_wrong_sweep_is_one_line_with_file_field_and_remedy(write_sweep, capsys, fields, field, remedy):
    path = write_sweep(**fields)
    assert main(["sweep", str(path), "--dry-run"]) == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    assert line.startswith(f"fedsim: error: {path}: {field}: ")
    assert remedy in line


def test_a_parameter_that_is_given_twice_is_refused(tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text("method: grid\nparameters:\n  a.b: {values: [4, 8]}\n  a.b: {values: [16]}\n")
    assert "parameters.a.b: is given twice, in lines 3 and 4" in refuse(capsys, "sweep", path, "--dry-run")


def test_a_config_that_is_not_there_is_a_warning_of_a_dry_run_and_refused_here(write_sweep, capsys, caplog, tmp_path):
    path = write_sweep(
        parameters={"config": {"values": ["nothere.yaml"]}}, program="fedsim", command=["${program}", "fit", "${args}"]
    )
    assert main(["sweep", str(path), "--dry-run"]) == 0
    assert "nothere.yaml: cannot read this config" in caplog.text
    line = refuse(capsys, "sweep", path, "--local", "--run_dir", tmp_path / "runs")
    assert "nothere.yaml: cannot read this config" in line


def test_a_file_in_another_encoding_is_named(tmp_path, capsys):
    (tmp_path / "s.yaml").write_bytes("# Köln\nmethod: grid\n".encode("latin-1"))
    assert "save it in UTF-8" in refuse(capsys, "sweep", tmp_path / "s.yaml", "--dry-run")


def test_no_drawn_name_of_a_parameter_becomes_another_option(write_sweep):
    drawn, slipped = random.Random(3), []
    for number in range(300):
        name = "".join(
            drawn.choice(["data", ".val", "-", "--", "=", " ", "\n", "\t", "x"]) for _ in range(drawn.randint(1, 5))
        )
        if name.strip(" \n\t") == name and not name.startswith("-") and not {*"=\n"} & {*name}:
            continue
        try:
            read_sweep(write_sweep(parameters={name: {"values": [1]}}))
            slipped.append((number, name))
        except ConfigError as error:
            slipped += [] if "is no name of an option" in str(error) else [(number, error)]
    assert slipped == []
    sweep = read_sweep(
        write_sweep(parameters={"model.clients.some town-1.batch_size": {"values": [4]}, "a": {"values": [1]}})
    )
    assert [*sweep.parameters] == ["model.clients.some town-1.batch_size", "a"]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [("a: &a [*a]", "repeats the section"), ("[" * 80, "more than 50 sections"), ("a: {b: ", "is not valid YAML"),
     ("[1, 2]", "does not name an option"), ("1: {values: [1]}", "does not name an option"),
     ("x", "does not name an option"),
     ("a: 2021-13-45", "cannot be read"), (b"\xff", "cannot read this config"), ("a: 1", "expected names with values"),
     ("metric: [1]", "metric.name"), ("method: {}", "is unknown"), ("-x: {values: [1]}", "is no name of an option")],
)  # fmt: skip
def test_ranges_of_any_text_are_one_line(tmp_path, capsys, lines, problem):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"# sweep: " + (lines if isinstance(lines, bytes) else lines.encode()) + b"\n")
    line = refuse(capsys, "sweep", "--method", path, "--dry-run", "--count", "2")
    assert problem in line


def test_wrong_calls(write_sweep, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for args, text in (
        ([str(write_sweep())], "give one of --dry-run, --local and --print"),
        ([str(write_sweep()), "--dry-run", "--local"], "give one of"),
        ([str(tmp_path / "nowhere.yaml"), "--dry-run"], "nowhere.yaml is not there"),
        ([str(write_sweep()), "--dry-run", "--count=0"], "--count: 0 is less than 1"),
        ([str(write_sweep()), "--local", "--compare", "000/table9"], "paper 000 has no table9"),
        ([str(write_sweep()), "--local", "--compare", "999"], "--compare"),
        ([str(write_sweep()), "--dry-run", "--compare", "000"], "--compare: without --local"),
        ([str(write_sweep()), "--dry-run", "--run_dir", "a\nb"], "--run_dir: 'a\\nb' holds a control character"),
        ([str(write_sweep()), "--dry-run", "--seed=-1"], "--seed: -1 is not in [0, 4294967295]"),
        ([str(write_sweep()), "--dry-run", f"--seed={10**22}"], f"--seed: {10**22} is no integer of 64 bits"),
        ([str(write_sweep()), "--local", "--", "--run_dir=x"], "--run_dir=x: leave it out"),
        ([str(write_sweep()), "--local", "--", "--ckpt_path", "x"], "--ckpt_path: leave it out"),
        (["--dry-run"], "give one of FILE, --method NAME and --paper PAPER/SWEEP"),
        (["--dry-run", "--method=fedpav", "--paper=003/figure4"], "give one of FILE"),
        ([str(write_sweep()), "--dry-run", "--method=fedpav"], "give one of FILE"),
        ([str(write_sweep()), "--dry-run", "--config=x"], "--config: is for --method and --paper"),
        (["--print", "--method=fedpaf"], "--method: there is no configs/methods/fedpaf.yaml; did you mean fedpav"),
        (["--print", "--paper=003"], "--paper: name a sweep: 003/figure4_batch_sizes, 003/figure5_local_epochs"),
        (["--print", "--paper=003/table5"], "--paper: paper 003 has no table5; choose from figure4_batch_sizes"),
        ([str(write_sweep()), "--print", "--local"], "give one of"),
        ([str(write_sweep(method="random")), "--dry-run"], "--count"),  # written last
    ):
        assert main(["sweep", *args]) == 2
        assert text in capsys.readouterr().err
    broken = tmp_path / "broken.yaml"
    broken.write_text("method: {grid\n")
    with pytest.raises(DataError, match="not valid YAML"):
        read_sweep(broken)


# -- samples -----------------------------------------------------------------------------------------------------------


def sample_many(write_sweep, parameter, count=2000):
    sweep = read_sweep(write_sweep(method="random", parameters={"a": parameter}))
    return [sample["a"] for sample in samples(sweep, count)]


@pytest.mark.parametrize(
    ("parameter", "law"),
    [
        ({"min": 0.5, "max": 2.0}, stats.uniform(0.5, 1.5)),
        ({"distribution": "uniform", "min": 1, "max": 4}, stats.uniform(1, 3)),
        ({"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-1}, stats.loguniform(1e-4, 1e-1)),
        ({"distribution": "normal", "mu": 2, "sigma": 0.5}, stats.norm(2, 0.5)),
        ({"mu": 1.0}, stats.norm(1, 1)),
    ],
    ids=["range", "uniform", "log_uniform_values", "normal", "mean"],
)
def test_continuous_distributions_follow_their_law(write_sweep, parameter, law):
    assert stats.kstest(sample_many(write_sweep, parameter), law.cdf).pvalue > 0.001


@pytest.mark.parametrize(
    ("parameter", "shares"),
    [
        ({"min": 1, "max": 3}, {1: 1 / 3, 2: 1 / 3, 3: 1 / 3}),
        ({"values": ["x", None, 2]}, {"x": 1 / 3, None: 1 / 3, 2: 1 / 3}),
        ({"values": ["x", "y"], "probabilities": [0.9, 0.1]}, {"x": 0.9, "y": 0.1}),
        ({"distribution": "q_uniform", "min": 0, "max": 1, "q": 0.5}, {0.0: 0.25, 0.5: 0.5, 1.0: 0.25}),
        ({"distribution": "q_uniform", "min": 2, "max": 6, "q": 2}, {2: 0.25, 4: 0.5, 6: 0.25}),
        ({"value": 7}, {7: 1.0}),
    ],
    ids=str,
)
def test_discrete_distributions_have_their_shares(write_sweep, parameter, shares):
    counts = Counter(sample_many(write_sweep, parameter))
    assert set(counts) == set(shares)
    assert all(abs(counts[value] / 2000 - share) < 0.05 for value, share in shares.items())
    if parameter.get("q") == 2:  # of whole numbers: an option that wants one is given one
        assert all(type(value) is int for value in counts)


def test_a_grid_is_all_combinations_the_last_one_fastest(write_sweep):
    parameters = {"a": {"values": [1, None]}, "b": {"value": "x"}, "c": {"min": 1, "max": 3},
                  "d": {"distribution": "q_uniform", "min": 0.1, "max": 0.3, "q": 0.1}}  # fmt: skip
    sweep = read_sweep(write_sweep(parameters=parameters))
    expected = [
        {"a": a, "b": "x", "c": c, "d": d} for a, c, d in itertools.product([1, None], [1, 2, 3], [0.1, 0.2, 0.3])
    ]
    assert list(samples(sweep)) == expected
    assert list(samples(sweep, 3)) == expected[:3]
    assert list(samples(read_sweep(write_sweep(parameters=parameters, run_cap=2)))) == expected[:2]


def test_random_draws_depend_on_the_seed_and_on_nothing_else(write_sweep):
    one, two = {"min": 0.0, "max": 1.0}, {"values": list(range(100))}
    sweep = read_sweep(write_sweep(method="random", parameters={"a": one, "b": two}))
    assert list(samples(sweep, 3)) == list(samples(sweep, 5))[:3]
    assert list(samples(sweep, 3)) != list(samples(sweep, 3, seed=1))
    alone = read_sweep(write_sweep(method="random", parameters={"a": one}))
    assert [sample["a"] for sample in samples(sweep, 3)] == [sample["a"] for sample in samples(alone, 3)]
    with pytest.raises(ConfigError, match="--count"):
        next(samples(sweep))


# -- command lines -----------------------------------------------------------------------------------------------------

VALUES = [None, True, 1e-05, 0.1, 8, "size", [64, 32], ["a", None], {"class_path": "X", "init_args": {"b": None}}]


def test_command_lines_are_those_of_wandb(write_sweep, monkeypatch):
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils", reason="W&B is not installed")
    monkeypatch.setenv("WHERE", "here")
    command = [
        "${env}",
        "${interpreter}",
        "-m",
        "${program}",
        "fit",
        "--config=${envvar:WHERE}/x.yaml",
        "${args}",
        "${args_no_hyphens}",
    ]
    sample = {f"a.b{i}": value for i, value in enumerate(VALUES)}
    sweep = read_sweep(write_sweep(command=command))
    parts = utils.create_sweep_command_args({"args": {name: {"value": value} for name, value in sample.items()}})
    parts |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": ["fedsim"]}
    expected = []
    for word in utils.create_sweep_command(list(command)):
        expected += parts[word[2:-1]] if word.startswith("${") else [word]
    assert command_of(sweep, sample) == expected


TYPES = [
    ("model.client.grad_clip", None, "grad_clip", None),
    ("model.client.drop_partial", True, "drop_partial", True),
    ("model.client.optimizer.init_args.lr", 1e-05, "lr", 1e-05),
    ("model.client.optimizer", {"class_path": "torch.optim.Adam", "init_args": {"lr": 1e-05}}, "lr", 1e-05),
    ("model.selection", {"class_path": "RandomFraction", "init_args": {"fraction": 0.25}}, "fraction", 0.25),
    ("model.method.weighting", "uniform", "weighting", "uniform"),
    ("model.clients", {"town0": {"grad_clip": None, "local_epochs": 3, "drop_partial": False}}, "local_epochs", 3),
    ("data.size", [32, 16], "size", [32, 16]),
    ("data.unseen", ["town1", "town2"], "unseen", ["town1", "town2"]),
    ("data.limit_client_batches", 1, "limit_client_batches", 1),
    ("run_dir", None, "run_dir", None),
]  # fmt: skip


def parse(args):
    """Return what the command line's parser makes of the options of a fit."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        assert main(["fit", *args, "--print_config"]) == 0, errors.getvalue()
    assert ended.value.code in (0, None)
    return yaml.safe_load(output.getvalue())


def values_of(content, name):
    if isinstance(content, dict):
        for key, value in content.items():
            yield from [value] if key == name else []
            yield from values_of(value, name)


@pytest.mark.parametrize(("name", "value", "last", "expected"), TYPES, ids=lambda v: str(v)[:40])
def test_every_type_of_value_that_wandb_writes_is_understood(tiny, name, value, last, expected):
    config = parse(["--config", str(tiny), f"--{name}={value}"])
    assert expected in list(values_of(config, last))


def test_what_is_not_pythons_is_left_alone():
    args = ["--a=None", "--b={None: x", "--c={x: None}", "--d=[null]", "--None=1", "--e=NoneSuch"]
    assert normalise(args) == ["--a=null", *args[1:]]


def with_every_value(sweep):
    """Samples in which each listed value is tried: as many as the longest list has values."""
    lists = {name: parameter.values for name, parameter in sweep.parameters.items() if parameter.values}
    for number, sample in enumerate(samples(sweep, max(map(len, lists.values())))):
        yield sample | {name: values[number % len(values)] for name, values in lists.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", others.each_third(METHODS))
def test_every_value_of_a_method_s_sweep_parses(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = sweep_of(sweep_of_method(name, []), name)
    assert (sweep.metric, sweep.maximize) == ("val/mAP", True)
    for sample in with_every_value(sweep):
        env, program, command, *options = command_of(sweep, sample)
        assert [env, program, command] == ["/usr/bin/env", "fedsim", "fit"]
        config = parse(options)
        for name, value in sample.items():
            found = list(values_of(config, name.rpartition(".")[2]))
            paths = [str(part.get("class_path")).rpartition(".")[2] for part in found if isinstance(part, dict)]
            assert value in [*found, *paths], name
        assert "SyntheticReID" in config["data"]["source"]["class_path"]


# -- sweeps of methods -------------------------------------------------------------------------------------------------


def sweep_text(capsys, *args):
    assert main(["sweep", *args, "--print"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_there_is_a_sweep_for_every_method(monkeypatch):
    monkeypatch.chdir(ROOT)
    files = {path.stem for path in (ROOT / "src" / "fedsim" / "methods").glob("[a-z]*.py")} - OF_SEVERAL_METHODS
    assert set(METHODS) >= files | {"centralised"}
    for name in METHODS:
        sweep = sweep_of(sweep_of_method(name, []), name)
        assert (sweep.metric, sweep.maximize) == ("val/mAP", True)
        assert len(sweep.parameters) > 1, name
        assert len(list(samples(sweep))) == (12 if sweep.method == "grid" else 24)


def test_ranges_stand_in_the_method_s_config(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    sweep = sweep_text(capsys, "--method", "fedprox")
    assert sweep["method"] == "random"
    assert sweep["run_cap"] == 24
    assert list(sweep["parameters"]) == [
        "model.client.optimizer.init_args.lr", "model.client.local_epochs", "model.method.init_args.mu",
        "model.method.init_args.weighting",
    ]  # fmt: skip
    assert sweep["parameters"]["model.method.init_args.mu"] == {"values": [0.001, 0.01, 0.1, 1.0]}
    files = ["quickstart", "methods/fedprox", "loggers/wandb"]
    assert sweep["command"] == [
        "${env}",
        "${program}",
        "fit",
        *(f"--config=configs/{f}.yaml" for f in files),
        "${args}",
    ]
    assert "model.client.local_epochs" not in sweep_text(capsys, "--method", "fedsgd")["parameters"]
    assert sweep_text(capsys, "--method", "local")["method"] == "grid"


def test_a_method_without_ranges_of_its_own_sweeps_rate_and_epochs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("# My method.\nmodel: {method: FedPav}\n")
    sweep = sweep_text(capsys, "--method", "mine.yaml", "--config", "a.yaml", "--config", "b.yaml")
    assert sweep["parameters"] == {
        "model.client.optimizer.init_args.lr": {"distribution": "log_uniform_values", "min": 0.0001, "max": 0.01},
        "model.client.local_epochs": {"values": [1, 2, 5]},
    }
    assert sweep["command"][3:6] == ["--config=a.yaml", "--config=b.yaml", "--config=mine.yaml"]
    assert main(["sweep", "--method", "mine.yaml", "--print", "--", "--trainer.max_epochs=3"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["command"][-2:] == ["${args}", "--trainer.max_epochs=3"]
    Path("mine.yaml").write_text("# sweep: a: {values: [1\n# sweep: b: 1\n")
    assert main(["sweep", "--method", "mine.yaml", "--print"]) == 2
    assert "mine.yaml: lines # sweep: OPTION: RANGE: line 1 is not valid YAML" in capsys.readouterr().err


def test_what_is_printed_is_what_is_run(write_sweep, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for given in (["--method", "fedavg"], ["--paper", "003/figure4"], [str(write_sweep())]):
        assert main(["sweep", *given, "--print"]) == 0
        (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
        lines = []
        for chosen in (given, [str(tmp_path / "printed.yaml")]):
            assert main(["sweep", *chosen, "--dry-run", "--run_dir", "runs/x"]) == 0
            lines.append(capsys.readouterr().out)
        assert lines[0] == lines[1]


def test_sweeps_of_a_paper_take_the_users_data_and_go_where_they_are_called(capsys):
    assert main(["sweep", "--paper=001/figure3", "--config=mine.yaml", "--dry-run"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 10
    assert lines[0][3:6] == [
        "--config=mine.yaml",
        "--paper=001/figure3_single",
        "--model.privacy.init_args.beta=0.0001",
    ]
    assert lines[0][6].startswith("--run_dir=runs/sweep-001-figure3/")


def test_dry_run_prints_what_would_run(write_sweep, capsys, tmp_path):
    path = write_sweep(parameters={"model.clients": {"values": [None, {"c": 1}]}})
    assert main(["sweep", str(path), "--dry-run", "--run_dir", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, second = map(shlex.split, lines)
    assert first[:3] == ["fedsim", "fit", "--model.clients=None"]
    assert second[2] == "--model.clients={'c': 1}"
    assert first[3] != second[3]
    assert first[3].startswith(f"--run_dir={tmp_path / 'runs'}/")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("how", ["--dry-run", "--local"])
def test_options_that_fit_lacks_are_refused_before_a_draw(write_sweep, capsys, tmp_path, how):
    path = write_sweep(parameters={"model.klient.lr": {"values": [1, 2]}})
    assert main(["sweep", str(path), how, "--run_dir", str(tmp_path / "runs")]) == 2
    assert "--model.klient: there is no such option; did you mean --model.client?" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


FIT = ["fedsim", "fit", "--config=quickstart"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--model.method.weightng=cdw"], "model.method: FedPav has no option weightng; did you mean weighting?"),
        (["--model.method", "FedProx", "--model.method.init_args.muu", "1"], "FedProx has no option muu; did you mean"),
        (["--model.method={class_path: fedsim.methods.SKA}", "--model.method.duall=1"], "did you mean dual?"),
        (["--config=methods/ska", "--model.method.unsen=avg"], "model.method: SKA has no option unsen; did you mean"),
        (["--config=methods/fedpav_kd_cdw", "--model.method.distillation.epoch=1"], "did you mean --model.method"),
        (["--model.selection=UCB", "--model.selection.rhoo=1"], "model.selection: UCB has no option rhoo; did"),
        (["--model.server_optimizer=FedAdam", "--model.server_optimizer.taau=1"], "did you mean tau?"),
        (["--model.client.batchsize=4"], "--model.client.batchsize: there is no such option; did you mean"),
        (["--model.client.optimizer.lrr=1"], "model.client.optimizer: Adam has no option lrr; did you mean lr?"),
        (["--data.source.sale=1"], "data.source: SyntheticReID has no option sale; did you mean scale?"),
        (["--data.augmentation.pdd=1"], "did you mean --data.augmentation.pad?"),
    ],
)  # fmt: skip
def test_options_that_a_class_lacks_are_refused_before_a_draw(write_sweep, capsys, options, line):
    path = write_sweep(command=[*FIT, *options, "${args}"], parameters={"seed_everything": {"values": [1, 2]}})
    assert line in refuse(capsys, "sweep", path, "--dry_run")


def test_a_drawn_name_that_the_class_lacks_is_refused(write_sweep, capsys):
    swept = {"model.method": {"values": ["FedPav", "FedProx"]}, "model.method.mu": {"values": [0.1]}}
    path = write_sweep(command=[*FIT, "${args}"], parameters=swept)
    assert "model.method: FedPav has no option mu" in refuse(capsys, "sweep", path, "--dry_run")
    swept["model.method"]["values"] = ["FedProx", "MOON"]
    path = write_sweep(command=[*FIT, "${args}"], parameters=swept)
    assert main(["sweep", str(path), "--dry_run"]) == 0


def test_a_name_that_the_class_of_a_papers_row_lacks_is_refused(write_sweep, capsys):
    path = write_sweep(command=["fedsim", "fit", "--paper=000/table4_lsn", "--model.method.mu=1", "${args}"])
    assert "model.method: SKA has no option mu; choose from dual, " in refuse(capsys, "sweep", path, "--dry_run")


@pytest.mark.parametrize(
    "options",
    [
        ["--model.method=my.package.Own", "--model.method.anything=1"],
        ["--config=nowhere.yaml", "--model.method.weightng=cdw"],
        ["--model.client.optimizer=my.package.Own", "--model.client.optimizer.lrr=1"],
        ["--model.clients.town0.batchsize=1"],
        ["--data.source=[SyntheticReID]", "--data.source.sale=1"],
        ["--model.method=own.yaml", "--model.method.anything=1"],
        ["--model.backbone=TimmBackbone", "--model.backbone.options.drop_rate=0.1"],
        ["--model.client.local_epochs=3", "--model.method.cdw_mode=eval", "--model.evaluation.layer=pool"],
        ["--trainer.callbacks.anything=1", "--trainer.strategy.timeout=0:01:00"],
    ],
)
def test_where_the_class_is_not_known_nothing_is_said(write_sweep, capsys, options):
    path = write_sweep(command=[*FIT, *options, "${args}"], parameters={"seed_everything": {"values": [1]}})
    assert main(["sweep", str(path), "--dry_run"]) == 0, capsys.readouterr().err


def test_options_of_another_program_are_its_own_affair(write_sweep, capsys):
    path = write_sweep(command=["mine", "fit", "${args}"], parameters={"speed": {"values": [1]}})
    assert main(["sweep", str(path), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("mine fit --speed=1")


def test_help_says_where_draws_go(write_sweep, capsys):
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    assert "default: runs/sweep-FILE" in " ".join(capsys.readouterr().out.split())
    assert main(["sweep", str(write_sweep()), "--dry-run"]) == 0
    assert all(" --run_dir=runs/sweep-sweep/" in line for line in capsys.readouterr().out.splitlines())


def test_options_after_two_hyphens_are_for_every_draw(write_sweep, capsys, tmp_path):
    run_dir = ["--run_dir", str(tmp_path / "runs")]
    folders = []
    for extra in ([], ["--", "--data.dry_run=true", "--config", "a b"], ["--", "--data.dry_run=true"]):
        assert main(["sweep", str(write_sweep()), "--dry-run", *run_dir, *extra]) == 0
        lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
        assert [line[2] for line in lines] == ["--seed_everything=1", "--seed_everything=2"]
        assert [line[4:] for line in lines] == [extra[1:]] * 2
        folders += [line[3] for line in lines]
    assert len(set(folders)) == 6  # other options are other runs


def test_sweeps_that_would_fill_the_memory_are_all_refused_at_once(write_sweep, capsys):
    """Drawn: ranges of up to 10^300 values, steps down to the smallest number, many values, many draws."""
    drawn, slipped = random.Random(11), []
    for _ in range(200):
        kind, size = drawn.choice(["int", "step", "product", "count", "cap"]), 10 ** drawn.randint(6, 300)
        options, method, parameters = [], "grid", {"a": {"values": [1, 2]}}
        if kind == "int":
            parameters["b"] = {"min": 0, "max": size}
            options = drawn.choice([[], ["--count", "3"]])
        elif kind == "step":
            parameters["b"] = {"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 1.0 / size}
        elif kind == "product":
            parameters |= {f"p{number}": {"values": list(range(20))} for number in range(drawn.randint(4, 30))}
        else:
            method = "random"
            options = ["--count", str(min(size, 10**18))] if kind == "count" else []
        cap = {"run_cap": min(size, 10**18)} if kind == "cap" else {}
        code = main(["sweep", str(write_sweep(method=method, parameters=parameters, **cap)), "--dry-run", *options])
        line = capsys.readouterr().err
        if code != 2 or line.count("\n") != 1 or ("give " not in line and "too small" not in line):
            slipped.append((kind, size, code, line))
    assert slipped == []


@pytest.mark.parametrize("fields", [
    {"min": 0, "max": 10**400}, {"min": -1.5e308, "max": 1.5e308}, {"min": -(10**308), "max": 10**308},
    {"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 5e-324},
    {"distribution": "q_uniform", "min": 0, "max": 10**300, "q": 1e-300},
    {"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 1e-300},
    {"distribution": "log_uniform_values", "min": 1e-200, "max": 1e200},
])  # fmt: skip
def test_numbers_beyond_a_float_are_one_line(write_sweep, capsys, fields):
    path = write_sweep(method="random", parameters={"a": fields})
    assert main(["sweep", str(path), "--dry-run", "--count", "2"]) == 2
    line = capsys.readouterr().err
    assert "parameters.a." in line or "sweep.yaml: line " in line


def test_runs_on_this_machine_do_without_wandb_where_it_is_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["sweep", "--method", "fedprox", "--dry-run", "--count", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert not any("wandb" in line for line in lines)
    printed = sweep_text(capsys, "--method", "fedprox")
    assert "--config=configs/loggers/wandb.yaml" in printed["command"], "W&B's server needs it"


def test_a_sweep_of_a_method_is_made_in_any_folder(tmp_path, monkeypatch, capsys):
    """Away from the repository, with the same command as in it: names of shipped configs work anywhere."""
    monkeypatch.chdir(ROOT)
    expected = sweep_text(capsys, "--method", "fedprox")
    monkeypatch.chdir(tmp_path)
    assert sweep_text(capsys, "--method", "fedprox") == expected
    assert main(["sweep", "--method", "fedprux", "--print"]) == 2
    assert "--method: there is no configs/methods/fedprux.yaml; did you mean fedprox or " in capsys.readouterr().err
