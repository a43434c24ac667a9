"""Papers as data: every row resolves as it always did, and runs on drawn stand-ins of the data sets."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections import ChainMap
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import save_file

import others
from environment import is_of_a_launcher
from fedsim.__main__ import main
from fedsim.cli import describe
from fedsim.cli.describe import describe_federation
from fedsim.core.errors import ConfigError
from fedsim.data import datamodule, datasets, write_generated
from fedsim.data.datasets import VIPeR
from fedsim.evaluation.plan import EvaluationPlan
from fedsim.models import ResNet
from fedsim.papers.files import find_in_paper, list_papers, read_paper, with_paper
from fedsim.papers.resolved_rows import resolved_row
from fedsim.report.closest import closest_row, closest_table
from fedsim.report.runs import Run
from fedsim.sweep.file import sweep_of
from fedsim.sweep.made import sweep_of_paper
from fedsim.sweep.sampling import command_of, samples
from small import refuse

ROOT = Path(__file__).parents[2]
FILES = ROOT / "src" / "fedsim" / "papers"
ROWS = [f"{key}/{name}" for key in list_papers() for name in read_paper(key).rows]
RESOLVED = json.loads((Path(__file__).parent / "papers_resolved.json").read_text())
SWEEPS = {  # runs
    "000/table2_and_table3": 9,
    "000/table4": 6,
    "000/table5": 5,
    "000/table6": 4,
    "003/figure4_batch_sizes": 3,
    "003/figure5_local_epochs": 3,
    "001/table2": 6,
    "001/table2_cifar10": 8,
    "001/figure3": 10,
    "001/figure4_clients": 3,
    "001/figure4_expert": 2,
    "001/figure4_fraction": 3,
    "001/figure4_local_epochs": 3,
    "002/selection": 9,
    "002/table10": 4,
    "004/table3": 5,
    "004/table4": 5,
    "004/table7": 6,
    "005/table1": 33,
}
UNSEEN = ("005", "006", "007")
"""papers with a target on which no client trains"""
FEW = [{"class_path": "VIPeR", "init_args": {"root": "data"}}]
SMALL = [
    "--data.dry_run=true", "--model.backbone=SmallCNN", "--model.backbone.width=8", "--data.size=[32, 16]",
    "--model.adaptive_backbones=null",
    "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.enable_progress_bar=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def standins(tmp_path_factory):
    """A folder for the stand-ins of all dry runs: each is drawn once."""
    return tmp_path_factory.mktemp("standins")


@pytest.fixture(autouse=True)
def _one_folder(standins, monkeypatch):
    monkeypatch.setattr(datamodule, "TemporaryDirectory", lambda prefix: SimpleNamespace(name=str(standins)))


def configs_of(row):
    paper, name = find_in_paper(row)
    return paper.configs(name)


def commands_in(key):
    """Command lines in the comments of a paper's file, as lists of words, without ``fedsim``."""
    comments = re.findall(r"^ *#(.*)$", (FILES / f"{key}.yaml").read_text(), re.MULTILINE)
    text = "\n".join(comments).replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in map(str.strip, text.splitlines()) if line.startswith("fedsim ")]


def names_clients(row):
    """Whether a row has settings of single clients, other than networks, which then must be there."""
    overrides = [config.get("model", {}).get("clients", {}) for config in configs_of(row)]
    return any(set(own) - {"backbone"} for of_config in overrides for own in of_config.values())


def has_generated(row):
    """Whether a row asks for generated images."""
    return any(config.get("data", {}).get("generated") for config in configs_of(row))


def write_few(folder):
    """Write generated images for the client of ``FEW``; return their number."""
    (client,) = datamodule.FederatedDataModule(VIPeR("data"), val="none", dry_run=True).federated.clients
    a, b, c = client.train.identities[:3].tolist()
    labels = [{a: 1.0}, {b: 0.5, c: 0.25}, {c: 0.25}]
    write_generated(folder / client.name, torch.zeros(3, 3, 8, 4, dtype=torch.uint8), labels)
    return len(labels)


def few_of(row):
    """Options that put one small data set in the place of a row's, with what the row adds to them."""
    paper, name = find_in_paper(row)
    if names_clients(row) or paper.rows[name].get("data") == "market1501":
        return []
    added = [source for config in configs_of(row) for source in config.get("data", {}).get("source+", [])]
    return [f"--data.source={json.dumps([*FEW, *added])}", "--data.unseen=null"]


def on_standins(row, run_dir):
    """The options of a row for few data sets and in small."""
    common = [] if names_clients(row) else ["--model.clients=null"]  # else networks of clients that are not there
    small = SMALL
    if "weights: runs/" in yaml.safe_dump(configs_of(row)):  # a network without weights is refused
        small = [
            *(word for word in SMALL if "backbone=" not in word and "width" not in word),
            "--model.backbone.depth=18",
        ]
    return ["--paper", row, *few_of(row), *small, *common, f"--run_dir={run_dir}"]


# -- what a row resolves to --------------------------------------------------------------------------------------------


def resolved(args):
    """Return what the parser makes of a fit's options: dotted name -> value, without the run directory."""
    found = flat(yaml.safe_load(printed_config(*args)))
    del found["run_dir"]
    return found


@cache  # many runs of sweeps are rows
def printed_config(*args):
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        assert main(["fit", *args, "--print_config"]) == 0, errors.getvalue()
    assert ended.value.code in (0, None)
    return output.getvalue()


def flat(content, prefix=""):
    if not isinstance(content, dict) or not content:
        return {prefix: content}
    return dict(ChainMap(*(flat(value, f"{prefix}.{name}".lstrip(".")) for name, value in content.items())))


LATER = {
    "model.aggregation": None,
    "model.attack": None,
    "model.backbone.init_args.ibn": False,
    "model.backbone.init_args.patch_stride": None,
    "model.backbone.init_args.style": None,
    "model.client.channels_last": False,
    "model.client.compile": False,
    "model.client.graph": False,
    "model.client.long_round.schedule.milestones": [40, 70],
    "model.client.micro_batch": None,
    "model.client.optimizer_state": None,
    "model.client.positives": "any",
    "model.client.prefetch": False,
    "model.client.schedule.milestones": [40, 70],
    "model.head.bias": True,
    "model.head.init": "normal",
    "model.method.init_args.distillation.teacher_mode": "eval",
    "model.module": None,
    "model.module_batch": None,
    "model.module_counts_from": "run",
    "model.private": None,
    "model.method.init_args.lam_first": 5e-4,  # FedDIP's numbers did change: its authors' code
    "model.method.init_args.layer": "pool",
    "model.method.init_args.regrow": False,
    "model.neck.affine": True,
    "model.neck.pooling": "average",
    "model.objective.causality": None,
    "model.objective.center": None,
    "model.objective.metric": None,
    "model.objective.unit_length": False,
    "model.selection.init_args.among": "all",
    "model.evaluation.precision": "32-true",
    "model.tf32": True,
    "model.timing": None,
}
"""settings that came after the record -> the value with which nothing changes"""


def later_default(name):
    """Those of single clients are the common one's."""
    return LATER.get(re.sub(r"^model\.clients\.[^.]+\.", "model.client.", name), ...)


def assert_resolves_to(args, key, difference):
    """``difference`` is to the base of the paper; a newer Lightning may have more options of its trainer."""
    gone = difference.get("gone", ())
    base = {name: value for name, value in RESOLVED["bases"][key].items() if name not in gone}
    expected = base | {name: value for name, value in difference.items() if name != "gone"}
    found = resolved(args)
    extra = {name for name in found.keys() - expected.keys() if not name.startswith("trainer.")}
    extra -= {name for name in extra if found[name] == later_default(name)}
    assert {name: found.get(name) for name in expected} == expected
    assert extra == set()


@pytest.mark.parametrize("row", others.first_of_each_table(RESOLVED["rows"]))
def test_every_row_resolves_to_what_it_always_was(row):
    """``papers_resolved.json``: what ``fedsim fit ... --print_config`` printed for the commands of single files.

    Those files stood in ``configs/papers`` before there was one per paper: data, protocol and row, one ``--config``
    after another. ``bases`` has all settings of one row of each paper by their dotted names, without ``run_dir``;
    ``rows`` and ``sweeps`` (a list of runs) have the settings in which others differ, and in ``gone`` those that they
    have not got.
    When a default of fedsim changes, change it in the bases by hand, and nothing else.
    """
    assert_resolves_to([f"--paper={row}"], row[:3], RESOLVED["rows"][row])


def test_every_row_has_an_expectation():
    since = {
        "004/table4_feddip",
        "004/table4_lotteryfl",
        "004/table4_subfedavg",
        "004/table6_fedcapr",
        "004/table7_all",
        "004/table7_fedcapr",
        "004/table7_kll_klaw",
        "000/table2_fedbn",
        "001/cifar10_fedatt_half",
        "001/cifar10_fedreid_half",
        "001/cifar10_half",
        "001/table2_fedatt_half",
        "001/table2_fedavg_half",
        "001/table2_fedreid_half",
    } | {row for row in ROWS if row[:3] in UNSEEN}  # runs of sweeps, or compared with
    assert set(RESOLVED["rows"]) | since == set(ROWS)
    used = {
        run
        for paper in map(read_paper, list_papers())
        for sweep in paper.sweeps.values()
        for name in sweep.get("rows", ())
        for run in paper.runs_of(name)
    }
    compared = {
        run
        for table in (t for key in list_papers() for t in read_paper(key).tables)
        for row in table.rows
        for run in row.runs
    }
    assert {row[4:] for row in since} <= used | compared


@pytest.mark.parametrize("name", others.each_third(SWEEPS))
def test_every_draw_of_a_sweep_resolves_to_what_it_always_was(name):
    sweep = sweep_of(sweep_of_paper(name, []), name)
    chosen_by = "val/mAP" if name[:3] in UNSEEN else "oracle/rank1"
    assert (sweep.metric, sweep.maximize) == (chosen_by, True)
    found = list(samples(sweep))
    assert len(found) == SWEEPS[name]
    for sample, difference in zip(found, RESOLVED["sweeps"].get(name, []), strict=name in RESOLVED["sweeps"]):
        _, program, command, *options = command_of(sweep, sample)
        assert [program, command] == ["fedsim", "fit"]
        assert_resolves_to(options, name[:3], difference)


def test_data_of_a_paper_are_those_of_configs_data():
    for key in list_papers():
        for name, data in read_paper(key).content["data"].items():
            path = ROOT / "configs" / "data" / f"{name}.yaml"
            if path.exists() and name != "cifar10":  # which has a part of the protocol
                assert yaml.safe_load(path.read_text()) == {"data": data}
    assert read_paper("001").content["data"]["cifar10"].items() >= {"partition": "iid", "parts": 4}.items()


# -- the option --------------------------------------------------------------------------------------------------------


def test_a_row_comes_before_all_other_options_wherever_it_stands():
    options = ["--config", "mine.yaml", "--model.client.batch_size=8"]
    expected = [*with_paper(["--paper", "003/table5_batch_64"]), *options]
    assert with_paper([*options, "--paper=003/table5"]) == expected
    assert with_paper(options) == options
    texts = [word.removeprefix("--config=") for word in expected[:3]]
    assert [*map(json.loads, texts)] == configs_of("003/table5_batch_64")
    assert resolved(["--model.client.batch_size=8", "--paper=003/table5"])["model.client.batch_size"] == 8


def test_a_paper_without_a_row_is_its_data_and_protocol():
    alone, row = resolved(["--paper=003"]), resolved(["--paper=003/table4"])
    assert alone == row  # of which the row says nothing new
    assert [*configs_of("003")] == configs_of("003/table4")[:2]


def test_the_users_own_data_win(tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {source: {class_path: VIPeR, init_args: {root: mine}}, val: identities}")
    found = resolved(["--config", str(tmp_path / "mine.yaml"), "--paper=003/table5"])
    assert found["data.source.class_path"] == "fedsim.data.datasets.VIPeR"
    assert found["data.source.init_args.root"] == "mine"
    assert found["data.val"] == "identities"
    assert found["model.client.batch_size"] == 64


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("099", "--paper: there is no paper 099; choose from 000, 001, 002, 003, 004, 005, 006, 007"),
        ("003/table2", "--paper: 003/table2 may be table2_by_camera, table2_by_identity; write one of them"),
        ("003/tabel5_batch_64", "--paper: paper 003 has no tabel5_batch_64; did you mean table5_batch_64"),
        ("003/xyz", "--paper: paper 003 has no xyz; choose from control_uniform, figure7_kd"),
    ],
)
def test_a_wrong_row_is_one_line(given, said, capsys):
    assert said in refuse(capsys, "fit", "--paper", given)
    if given != "003/table2":
        assert said.replace("--paper: ", "fedsim papers: ") in refuse(capsys, "papers", given)


def test_a_run_is_of_one_row(capsys):
    line = refuse(capsys, "describe", "--paper=003/table5", "--paper=003/table6")
    assert "--paper: a run is one row of one paper; leave out one of 003/table5, 003/table6" in line
    with pytest.raises(ConfigError, match="may be"):
        find_in_paper("000/table5")


def test_a_name_may_be_the_beginning_of_others():
    paper, name = find_in_paper("001/cifar10")
    assert name == "cifar10"
    assert len([row for row in paper.rows if row.startswith(name)]) > 1


def test_a_config_that_is_neither_file_nor_paper_is_one_line(capsys):
    assert "is not a file; write settings into a file" in refuse(capsys, "fit", "--config", "{model: x}")


def test_help_names_the_option(capsys):
    assert main(["fit", "--help"]) == 0
    assert "--paper 003/table5 a row of a paper's table" in " ".join(capsys.readouterr().out.split())


# -- fedsim papers -----------------------------------------------------------------------------------------------------


def papers(capsys, *args):
    assert main(["papers", *args]) == 0
    return capsys.readouterr().out


def test_all_papers_rows_sweeps_and_tables_are_listed(capsys):
    lines = papers(capsys).splitlines()
    for key in list_papers():
        file = read_paper(key)
        assert f"{key}: {file.content['title']}" in lines
        listed = [line.split(f"{key}/")[1].split()[0] for line in lines if re.match(rf" .* {key}/", line)]
        assert listed == [*file.rows, *file.sweeps, *file.content["tables"]]


def test_a_paper_is_shown_with_its_source_and_notes(capsys):
    text = papers(capsys, "003")
    assert "W. Zhuang et al., ACM Multimedia 2020" in text
    assert "mAP is trapezoidal; the authors' code says so" in text


def test_a_row_is_shown_with_its_overrides_printed_numbers_and_settings(capsys):
    shown = yaml.safe_load(papers(capsys, "003/table5"))
    assert list(shown) == ["rows", "tables"]
    (row,), (table,) = shown["rows"].values(), shown["tables"].values()
    assert row["notes"].startswith("Table 5: the federated model with batch size 64.")
    assert row["overrides"] == {"model": {"client": {"batch_size": 64}}}
    assert table["columns"] == ["rank1", "rank5", "rank10", "mAP"]
    assert table["rows"][0]["scores"]["market1501"] == [80.38, 91.26, 94.12, 56.01]
    assert table["rows"][0]["run"] == "table5_batch_64"
    assert "market1501: [80.38, 91.26, 94.12, 56.01]" in papers(capsys, "003/table5_batch")


def test_parts_sweeps_and_what_is_not_comparable_are_shown(capsys):
    text = papers(capsys, "004/table4")
    shown = yaml.safe_load(text)
    assert "&" not in text  # written out
    assert shown["rows"]["table4_lotteryfl"]["after"] == ["small_sets", "accounting", "resnet34", "table3_lotteryfl"]
    assert shown["sweeps"]["table4"]["rows"][:2] == ["table6_fedcapr", "table4_lotteryfl"]
    assert shown["tables"]["table4"]["rows"][0]["run"] == "table4_lotteryfl"
    assert shown["tables"]["table4"]["rows"][0]["costs"]["dukemtmc"] == [70.0, 1.74]  # percent pruned, GiB
    assert yaml.safe_load(papers(capsys, "003/figures"))["tables"]["figures"]["rows"][0]["status"] == "figure only"


def test_every_name_can_be_shown(capsys):
    for key in list_papers():
        file = read_paper(key)
        for name in (*file.rows, *file.sweeps, *file.content["tables"]):
            assert name in papers(capsys, f"{key}/{name}")


def test_listing_papers_does_not_import_torch():
    code = (
        "import sys; from fedsim.__main__ import main; codes = [main(['papers']), main(['papers', '003/table5'])]; "
        "assert codes == [0, 0], codes; assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# -- the files ---------------------------------------------------------------------------------------------------------

FIELDS = {"title", "source", "data", "protocol", "parts", "rows", "sweeps", "digits", "columns", "mAP", "rule", "notes",
          "test_sets", "clients", "counts", "tables", "contradictions"}  # fmt: skip


def test_files_have_known_fields_only():
    for key in list_papers():
        paper = read_paper(key)
        assert FIELDS - {"parts", "contradictions"} <= set(paper.content) <= FIELDS, key
        known = {*paper.rows, *paper.content.get("parts", {})}
        for name, row in paper.rows.items():
            assert {"notes"} <= set(row) <= {"data", "protocol", "after", "notes", "overrides"}, name
            assert set(row.get("after", ())) <= known, name
            assert row.get("data") in (None, *paper.content["data"]), name
        for name, sweep in paper.sweeps.items():
            assert {"notes"} < set(sweep) <= {"notes", "rows", "parameters", "metric"}, name
            assert {run for row in sweep.get("rows", ()) for run in paper.runs_of(row)} <= set(paper.rows), name


@pytest.mark.parametrize("key", list_papers())
def test_files_name_rows_and_files_that_exist(key):
    text = " ".join((FILES / f"{key}.yaml").read_text().split())
    mentioned = re.findall(r"\b(?:configs|docs|slurm|src)/[a-z\d_/.-]+\.(?:yaml|md|py)", text)
    assert [name for name in mentioned if not (ROOT / name).exists()] == []
    paper = read_paper(key)
    names = set(re.findall(r"(?<![\d/])\b(?:table|figure)\d+_[a-z\d_]+|\bcontrol_[a-z]+|\bcifar10_[a-z]+", text))
    assert names <= {*paper.rows, *paper.rotations, *paper.sweeps}
    for other, name in re.findall(r"\b(\d{3})/((?:table|figure)\d+_[a-z\d_]+)", text):
        also = read_paper(other)
        assert {name} <= {*also.rows, *also.rotations, *also.sweeps, *also.content["tables"]}


@pytest.mark.parametrize("key", list_papers())
def test_commands_in_the_comments_are_of_what_there_is(key):
    commands = commands_in(key)
    assert [words[0] for words in commands[:3]] == ["papers", "fit", "report"]
    for words in commands:
        if "--paper" in words:
            find_in_paper(words[words.index("--paper") + 1], "sweeps" if words[0] == "sweep" else "rows")


# -- rows run ----------------------------------------------------------------------------------------------------------


def as_a_run(row):
    """What ``--compare`` reads of a finished run of a row: its settings, and the test sets of its clients."""
    paper, name = find_in_paper(row)
    config = resolved_row(paper, name)
    sources = config["data"]["source"] if isinstance(config["data"]["source"], list) else [config["data"]["source"]]
    names = [
        getattr(datasets, source["class_path"].rpartition(".")[2]).name
        for source in sources if source["init_args"].get("protocol") != "splits"
    ]  # fmt: skip
    seen = [name for name in names if name not in (config["data"]["unseen"] or ())]
    run = Run(Path(row), {"final": {"metrics": {f"test/global/{name}/rank1": 0.5 for name in seen}}, "unseen": []})
    run.__dict__["config"] = config
    return run


def compared_with(row):
    """The printed row closest to a row's settings, in the table of its name or in the closest; and the row as a run."""
    paper, name = find_in_paper(row)
    run = as_a_run(row)
    tables = [table for table in paper.tables if table.name == name.partition("_")[0] and table.test_sets]
    match = closest_row(paper, tables[0] if tables else closest_table(paper, [run]), [run])
    return None if match is None else match.row, run


def kinds_of_models(model):
    """The kinds that are scored on clients' own test sets, of a federation that is assembled."""
    how, parts = model.settings.evaluation, model.parts
    of_parts = (parts.method, parts.server, parts.models, parts.archs, parts.federated, parts.rank_share.placement)
    plan = EvaluationPlan(*of_parts, how.layer, False)
    return {row.kind for row in plan.rows("test", tuple(parts.names)) if row.domain not in parts.federated.unseen}


@pytest.mark.parametrize("row", others.first_of_each_table(ROWS))
def test_every_row_fits_the_data_and_gives_the_kind_of_model_that_it_is_compared_with(
    row, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(
        describe,
        "describe_federation",
        lambda model, *rest, **how: seen.append(model) or describe_federation(model, *rest, **how),
    )
    words = on_standins(row, tmp_path)
    for file in re.findall(r"weights: (runs/\S+)", yaml.safe_dump(configs_of(row))):
        Path(file).parent.mkdir(parents=True)
        save_file(ResNet(18).state_dict(), file)
    if has_generated(row):
        write_few(tmp_path / "generated")
        words.append(f"--data.generated.root={tmp_path / 'generated'}")
    code = main(["describe", *words])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert "Shared tensors" in output.out
    printed, run = compared_with(row)
    if printed is not None and {*run.seen, "seen"} & set(printed.scores):
        assert printed.model in kinds_of_models(seen[0])


def test_every_sweep_is_tested():
    found = {f"{key}/{name}" for key in list_papers() for name in read_paper(key).sweeps}
    assert found == set(SWEEPS)


@pytest.mark.parametrize("name", others.each_third(SWEEPS))
def test_every_draw_of_a_sweep_fits_the_data(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = sweep_of(sweep_of_paper(name, []), name)
    few = [f"--data.source={json.dumps(FEW)}", "--data.unseen=null"]
    for sample in samples(sweep):
        if [*sample] == ["paper"]:  # every row fits, above
            assert sample["paper"] in ROWS
            continue
        options = command_of(sweep, sample)[3:]
        code = main(["describe", *options, *few, *SMALL, "--model.clients=null", f"--run_dir={tmp_path}"])
        assert code == 0, capsys.readouterr().err


def test_a_batch_of_128_is_there_for_every_client_of_a_dry_run(tmp_path, capsys):
    code = main(["describe", "--paper", "003/table6_batch_128", *SMALL, f"--run_dir={tmp_path}"])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert len(re.findall(r"^\w+ +0  smallcnn", output.out, re.MULTILINE)) >= 8


@pytest.mark.parametrize("name", ["table4_batch_32", "table7_local", "table2_by_camera"])
def test_a_small_run_stands_beside_its_table(name, tmp_path, capsys):
    words = on_standins(f"003/{name}", tmp_path / "run")
    options = ["--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=1", "--data.limit_client_batches=2"]
    assert main(["fit", *words, *options]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run"), "--compare", "003"]) == 0
    text = capsys.readouterr().out
    assert f"\n{name.partition('_')[0]}: " in text
    assert "DRY RUN" in text
    assert "best3 is the mean over rounds 1, 2, 3" in text
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())  # complete, by itself
    del config["run_dir"]
    assert flat(config) == resolved(["--config", str(tmp_path / "run" / "config.yaml")])
    assert {"config", "paper"}.isdisjoint(config)
    assert main(["test", "--ckpt_path", str(tmp_path / "run")]) == 0


def test_a_row_changes_what_its_name_says():
    assert read_paper("003").content["protocol"]["model"]["client"]["batch_size"] == 32
    for size, name in ((32, "table4"), (64, "table5"), (128, "table6")):
        assert configs_of(f"003/{name}_batch_{size}")[-1] == {"model": {"client": {"batch_size": size}}}


def test_the_sweep_over_methods_has_nine():
    sweep = sweep_of(sweep_of_paper("000/table2_and_table3", []), "000")
    found = [sample["paper"] for sample in samples(sweep)]
    assert len(found) == len(set(found)) == 9
    assert set(found) <= set(ROWS)


def test_a_paper_is_also_the_base_of_commands_on_data(tmp_path, capsys, standins):
    few = tmp_path / "few.yaml"
    few.write_text(yaml.safe_dump({"data": {"source": FEW[0] | {"init_args": {"root": str(standins)}}}}))
    datamodule.FederatedDataModule(VIPeR("data"), val="none", dry_run=True).federated  # noqa: B018 - draws the files
    output = tmp_path / "m.csv"
    assert main(["data", "manifest", "--paper=003", "--config", str(few), "--output", str(output)]) == 0
    assert "1 clients" in capsys.readouterr().out
    assert "has no data section" not in refuse(capsys, "data", "manifest", "--paper=003", "--output", str(output))


@pytest.mark.slow
def test_one_command_runs_tables_2_and_3_of_paper_000_and_prints_them(tmp_path, capsys, monkeypatch, quick_python):
    monkeypatch.chdir(ROOT)
    for name in filter(is_of_a_launcher, list(os.environ)):  # left by fits in this process; runs are processes
        monkeypatch.delenv(name)
    ((_, *given),) = [words for words in commands_in("000") if "--data.dry_run=true" in words]
    (position,) = [i for i, word in enumerate(given) if word == "--"]
    sets = [{"class_path": name, "init_args": {"root": "data"}} for name in ("Market1501", "VIPeR")]
    smaller = ["--model.backbone.width=4", "--data.size=[24, 12]", "--data.augmentation.crop=[20, 10]",
               f"--data.source={sets}", "--data.limit_client_batches=2", "--trainer.accelerator=cpu",
               "--trainer.devices=1"]  # fmt: skip
    own = [*given[:position], "--run_dir", str(tmp_path), "--count", "2"]
    assert main(["sweep", *own, *given[position:], *smaller]) == 0
    text = capsys.readouterr().out
    assert "\ntable2: " in text
    assert "68.2 / 87.4" in text  # local supervised, Market-1501
    assert "\ntable3: " in text
    assert "48.2 / 44.3" in text  # FedAvg+D, VIPeR
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json")]
    scores = {summary["method"]: summary["final"]["metrics"] for summary in found}
    for method, kind in (("Local", "personalised"), ("FedAvg", "global")):
        for name in ("market1501", "viper"):
            numbers = [100 * scores[method][f"test/{kind}/{name}/{metric}"] for metric in ("mAP_trapezoid", "rank1")]
            cell = "{:.1f} / {:.1f}".format(*numbers)
            assert [line for line in text.splitlines() if line.startswith(name) and cell in line]


# -- paper 002 ---------------------------------------------------------------------------------------------------------


def test_backbones_of_single_clients_are_those_of_clients_that_there_are():
    paper = read_paper("002")
    (clients,) = paper.content["clients"]
    for name, row in paper.rows.items():
        model = row["overrides"].get("model", {})
        overrides = model.get("clients", {})
        assert {*overrides, *model.get("adaptive_backbones", {}).get("caps", {})} <= set(clients), name
        for override in overrides.values():
            assert set(override) == {"backbone"}


OWN_BACKBONES = [
    row
    for row in ROWS
    if any("clients" in config.get("model", {}) for config in configs_of(row)) and not has_generated(row)
]
IN_SMALL = {
    ("ConvNeXt", "large"): {"class_path": "ConvNeXt", "init_args": {"size": "micro", "fam": "mscam"}},
    ("ConvNeXt", "tiny"): {"class_path": "SmallCNN", "init_args": {"width": 8, "fam": "mscam"}},
    ("ResNet", 50): {"class_path": "ResNet", "init_args": {"depth": 18, "weights": "IMAGENET1K_V1", "fam": "mscam"}},
}
"""Class and size -> a small network in its place: those of the rows are too large for a test."""


def in_small(content):
    """A part of a config with small networks."""
    if isinstance(content, list):
        return [in_small(part) for part in content]
    if not isinstance(content, dict):
        return content
    own = content.get("init_args") or {}
    small = IN_SMALL.get((content.get("class_path"), own.get("size", own.get("depth"))))
    return small or {name: in_small(part) for name, part in content.items()}


@pytest.mark.parametrize("row", others.each_third([row for row in OWN_BACKBONES if row.startswith("002")]))
def test_rows_with_backbones_of_single_clients_run_dry_without_a_network(row, tmp_path, monkeypatch, capsys):
    """With the row's own clients, ladder and caps; ``ResNet`` still asks for weights, which nobody downloads."""
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", no_network)
    words = []
    for number, config in enumerate(configs_of(row)):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(in_small(config)))
        words += ["--config", str(tmp_path / f"{number}.yaml")]
    given = configs_of(row)[-1]["model"]
    rounds = 2 if "adaptive_backbones" in given else 1
    if "adaptive_backbones" in given:
        words.append("--model.adaptive_backbones.every=1")
    small = [word for word in SMALL if not word.startswith(("--model", "--data.size"))]
    few = ["--data.size=[64, 32]", "--data.limit_client_batches=1", "--model.client.local_epochs=1",
           f"--trainer.max_epochs={rounds}", f"--trainer.check_val_every_n_epoch={rounds}"]  # fmt: skip
    run = tmp_path / "run"
    assert main(["fit", *words, *small, *few, f"--run_dir={run}"]) == 0, capsys.readouterr().err
    summary = json.loads((run / "summary.json").read_text())
    scores = summary["final"]["metrics"]
    assert {key.split("/")[2] for key in scores if key.startswith("test/global/")} == {*summary["clients"], "seen"}
    if "adaptive_backbones" in given:  # caps held, and somebody has stepped
        log = Run(run, summary).log
        rungs = [{n: r for n, r in log[t].items() if n.startswith("backbone/")} for t in (1, 2)]
        assert all(rungs[1][f"backbone/{name}"] == 1 for name in given["adaptive_backbones"]["caps"])
        assert rungs[0] != rungs[1]


@pytest.mark.parametrize("row", ["002/table5_global", "003/table4_batch_32"])
def test_no_description_needs_a_network(row, tmp_path, monkeypatch, capsys):
    """Their full backbones, ResNet-50 and ConvNeXt Tiny, with weights of ImageNet."""
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", no_network)
    source = ["--data.source=SyntheticReID", "--data.source.clients=2", "--data.source.scale=0.2"]
    words = ["--paper", row, *source, f"--run_dir={tmp_path}", "--trainer.accelerator=cpu", "--trainer.devices=1"]
    tiny = configs_of(row)[-1].get("model", {}).get("clients", {}).get("viper", {}).get("backbone")
    words.append(f"--model.clients={json.dumps({'town1': {'backbone': tiny}} if tiny else None)}")
    assert main(["describe", *words]) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    assert ("convnext" in text) == bool(tiny)
    for wrong in ("IMAGENET1K_V9", str(tmp_path / "weights.pth")):  # names and files are still looked at
        assert "backbone.weights: " in refuse(capsys, "describe", *words, f"--model.backbone.weights={wrong}")
    said = refuse(capsys, "fit", *words)  # real images need real weights
    assert "backbone.weights: cannot get" in said


def no_network(url, **_):
    raise OSError(f"there is no network to get {url}")


def test_tables_of_paper_002_differ_in_what_they_are_about(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)

    def shown(name):
        words = on_standins(f"002/{name}", tmp_path)
        assert main(["describe", *words]) == 0
        return capsys.readouterr().out

    averaged, partial = shown("table9_fedavg"), shown("table9_fedpav")
    assert re.search(r"^head .* shared$", averaged, re.MULTILINE)
    assert re.search(r"^head .* private$", partial, re.MULTILINE)
    assert "The selection of clients depends on the run" in shown("table10_iid_adaptive")
    assert "The selection of clients depends on the run" not in shown("table10_iid_plain")


def test_table_7_of_paper_002_is_about_generated_images(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)

    def shown(name, *options):
        words = on_standins(f"002/{name}", tmp_path)
        assert main(["describe", *words, *options]) == 0
        return capsys.readouterr().out

    count, without = write_few(tmp_path), shown("table7_no_generated")
    found = shown("table7_generated", f"--data.generated.root={tmp_path}")
    assert re.search(rf"^viper +0 .* {count}$", found, re.MULTILINE)
    assert "generated" not in without

    def rest(text):  # all but the tables of data and the identity
        changed = ("Data of the clients", "Data sets, as they are listed", "Identity")
        return [part for part in text.split("\n\n") if not part.startswith(changed)]

    assert rest(found) == rest(without)
    assert len(rest(found)) > 2
