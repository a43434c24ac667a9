"""Names of any signs through every command and writer: no name leaves the run directory, and each keeps its row."""

import csv
import html
import io
import os
import unicodedata
from html.parser import HTMLParser

import numpy as np
import pytest

import others
from fedsim.__main__ import main
from fedsim.core import names as core_names
from fedsim.core.names import metric_parts, problem_of_name
from fedsim.data.decoded import Wanted, find
from fedsim.data.federated import ClientData, FederatedData
from fedsim.data.generated import folders_of_clients
from fedsim.data.images import ImageFiles, Split
from fedsim.evaluation import plan
from fedsim.parsing.documents import as_yaml
from hostile_names import draws, rows_of, unfit_draws
from run_dirs import scores_of, with_mean, write_run
from sites import site
from small import refuse

GROUP = 40  # names of a run: metrics of single names are logged up to 50

CONFIG = """
seed_everything: 0
trainer:
  max_epochs: 1
  check_val_every_n_epoch: 1
  accelerator: cpu
  devices: 1
  enable_progress_bar: false
  logger: {class_path: TensorBoardLogger, init_args: {save_dir: RUN_DIR}}
model:
  method: METHOD
  backbone: {class_path: SmallCNN, init_args: {width: 4}}
  neck: {kind: linear, dim: 8, dropout: 0.2}
  client: {batch_size: 4, optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.01}}}
  clients: CLIENTS
data: {manifest: MANIFEST, val: none, size: [16, 8]}
"""


class Run:
    """A run on a manifest of these names, the last of which is unseen, in a folder with nothing else."""

    def __init__(self, folder, names, method="FedPav", unseen=1):
        self.folder, self.names, self.unseen = folder, names, unseen
        self.clients = names[: len(names) - unseen]
        manifest, self.config, self.place = folder / "m.csv", folder / "c.yaml", folder / "run"
        write_manifest(manifest, rows_of(folder / "images", names, unseen))
        clients = as_yaml({name: {"batch_size": 4} for name in self.clients})
        text = CONFIG.replace("METHOD", method).replace("MANIFEST", str(manifest)).replace("CLIENTS", clients)
        self.config.write_text(text)
        self.before = files_below(folder)

    def do(self, command, *options):
        code = main([command, "--config", str(self.config), "--run_dir", str(self.place), *options])
        assert code == 0, (command, self.names)

    def everything(self):
        self.do("fit")
        self.do("predict", "--ckpt_path=last")
        self.do("test", "--ckpt_path=last", "--save_ranking")

    def files(self, kind, suffix):
        return sorted((self.place / kind).glob(f"*{suffix}"))


def write_manifest(path, rows):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([["path", "pid", "cam", "dataset", "client", "part"], *rows])
    path.write_bytes(text.getvalue().encode(errors="surrogatepass"))


def files_below(folder):
    return {os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names}


def strays(run):
    """Files that are not in the run directory, and folders of a kind that hold other folders."""
    made = files_below(run.folder) - run.before
    outside = [path for path in made if not os.path.realpath(path).startswith(f"{run.place}{os.sep}")]
    nested = [path for kind in ("features", "rankings") for path in (run.place / kind).glob("*") if path.is_dir()]
    return outside + nested


def spellings(paths):
    """What case-insensitive disks and those that compose letters see of names."""
    return {unicodedata.normalize("NFC", unicodedata.normalize("NFC", path.name).casefold()) for path in paths}


class Cells(HTMLParser):
    """The texts of a page's cells, and the tags in it."""

    def __init__(self, page):
        super().__init__()
        self.cells, self.tags, self._in_cell = [], set(), False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "td":
            self.cells.append("")
        self._in_cell = tag == "td"

    def handle_endtag(self, tag):
        self._in_cell = False

    def handle_data(self, data):
        if self._in_cell:
            self.cells[-1] += data


@pytest.fixture(params=[pytest.param(seed, marks=others.unless(seed == 0)) for seed in range(8)])
def run(request, tmp_path, monkeypatch):
    folder = tmp_path / "home"
    (folder / "up" / "deep").mkdir(parents=True)
    monkeypatch.chdir(folder / "up" / "deep")  # what climbs out of here is seen
    run = Run(folder, draws(request.param, GROUP), *(("Local", 1) if request.param % 4 == 3 else ()))
    run.everything()
    return run


def test_every_writer_stays_in_the_run_directory_and_every_report_has_the_row(run, capsys):
    assert strays(run) == []
    several = 1 if not run.files("features", "@*") else len(run.clients)
    for kind, suffix in (("features", ".npz"), ("rankings", ".npz"), ("rankings", ".png")):
        files = run.files(kind, suffix)
        assert len(files) == len(run.clients) + several
        assert len(spellings(files)) == len(files)
        assert all(len(file.name.encode()) < 240 for file in files)
    with np.load(run.place / "queries.npz") as file:
        assert {metric_parts(key)[1] for key in file.files if key.endswith("/cmc")} == {*run.names}
    capsys.readouterr()
    page = run.place / "page.html"
    assert main(["report", str(run.place), "--format", "csv", "--html", str(page)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["data set"] for row in rows} == {*run.names, "seen", "unseen", "drop"}
    shown = Cells(page.read_text().partition("<script>")[0])
    for name in run.clients:
        assert any(cell.strip() == name.strip() for cell in shown.cells), name
    assert "xyz" not in shown.tags  # of a name
    for option in ("figure", "curves", "participation"):
        path = run.place / f"{option}.png"
        assert main(["report", str(run.place), f"--{option}", str(path)]) == 0
        assert path.stat().st_size
    first = run.clients[0]
    assert main(["report", str(run.place), "--target", f"{first}/rank1=99", "--fairness", "--significance"]) == 0
    assert main(["report", str(run.place), "--format", "markdown"]) == 0
    assert main(["report", str(run.place), "--format", "latex"]) == 0
    assert strays(run) == []
    numbers = {tuple(metric_parts(key)) for key in next(csv.reader((run.place / "metrics.csv").open(newline="")))}
    assert {("train", name, "loss") for name in run.clients} <= numbers
    assert {("comm", name, "up_bytes") for name in run.clients} <= numbers


def test_the_judge_sees_names_as_they_are(tmp_path, monkeypatch):
    """Writers that take names as they are: the judge finds each file outside, and each pair that shares one."""
    (tmp_path / "up" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "up" / "deep")
    run = Run(tmp_path, ["site/a", "Town", "town", "../../out", "new"])
    run.do("fit")
    monkeypatch.setattr(plan, "files_of_sets", lambda names: {name: name for name in names})
    run.do("predict", "--ckpt_path=last")
    assert sorted(os.path.relpath(path, tmp_path) for path in map(str, strays(run))) == ["out.npz", "run/features/site"]
    files = run.files("features", ".npz")
    assert len(spellings(files)) < len(files)


def test_what_cannot_be_a_name_is_refused_in_one_line(tmp_path, capsys):
    names = [name for name in unfit_draws(1, 40) if problem_of_name(name)]
    assert len(names) == 40
    path = tmp_path / "m.csv"
    options = ["--config=methods/fedpav", "--model.backbone=SmallCNN", f"--data.manifest={path}", "--data.val=none"]
    for place, name in enumerate(names):
        rows = rows_of(tmp_path / "images", ["town", name] if place % 2 else [name, "town"])
        write_manifest(path, rows)
        line = refuse(capsys, "describe", *options)
        assert f"{path}: line " in line, name
        assert "; rename it" in line or "\r" in name, name  # which is the end of a line of CSV
        assert line.isprintable(), name
    assert files_below(tmp_path) == {str(path), *files_below(tmp_path / "images")}


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "stra\udcdfe"])
def test_a_run_directory_has_a_name(tmp_path, capsys, name):
    options = ["--config=quickstart", "--trainer.devices=1", "--trainer.accelerator=cpu"]
    line = refuse(capsys, "fit", *options, "--run_dir", tmp_path / name)
    assert "run_dir: " in line
    assert line.isprintable()
    assert not files_below(tmp_path)


def test_a_slash_in_a_name_is_none_in_the_name_of_its_metric():
    for name in draws(5, 300):
        key = core_names.metric_name("test", "global", name, "mAP")
        assert key.count("/") == 3
        assert metric_parts(key) == ["test", "global", name, "mAP"]
        assert html.unescape(html.escape(name)) == name


BYTES = "stra\udcdfe"  # a folder's name that is not UTF-8, as Python shows it


def test_folders_whose_names_are_not_utf_8_end_in_one_line_or_work(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site(tmp_path / "d" / BYTES)
    site(tmp_path / BYTES / "town")
    options = ["--config=methods/fedpav", "--model.backbone=SmallCNN", "--data.val=none", "--data.source=MarketFolders"]
    for arguments, start in (
        (["init", "d"], "data.source: of a data set, 'stra\\udcdfe' holds bytes"),
        (["init", BYTES], "--folder: "),
        (["init", "d", "--output", f"{BYTES}.yaml"], "--output: stra\\udcdfe.yaml holds bytes"),
        (["data", "preview", "--root", "d"], "data.source: of a data set, 'stra\\udcdfe' holds bytes"),
        (["fit", *options, "--data.source.root=d"], "data.source: of a data set, 'stra\\udcdfe' holds bytes"),
        (["fit", *options, f"--data.source.root={BYTES}"], "--data.source.root: stra\\udcdfe holds bytes"),
        (["fit", *options, "--run_dir", f"{BYTES}/x"], "--run_dir: stra\\udcdfe/x holds bytes"),
        (["fit", *options, "--data.source.root=d", f"--data.unseen=[{BYTES}]"], "--data.unseen: [stra\\udcdfe]"),
    ):
        line = refuse(capsys, *arguments)
        assert line.startswith(f"fedsim: error: {start}"), line
        assert "UTF-8" in line
        assert line.isprintable()
    assert main(["data", "check", "d"]) == 1
    assert "holds bytes that are not UTF-8; rename it" in " ".join(capsys.readouterr().out.split())
    assert main(["data", "check", BYTES]) == 0
    assert main(["data", "preview", "--root", BYTES, "--output", f"{BYTES}.png"]) == 0


def test_reports_of_a_folder_whose_name_is_not_utf_8(tmp_path, capsys):
    runs = [write_run(tmp_path / f"{BYTES}{i}", {1: scores_of(with_mean({"town": 0.3}))}, 1) for i in range(2)]
    page = tmp_path / f"{BYTES}.html"
    figure = tmp_path / "f.png"
    assert main(["report", *map(str, runs), "--html", str(page), "--figure", str(figure)]) == 0
    assert "stra\\udcdfe1" in capsys.readouterr().out
    assert "stra\\udcdfe1" in page.read_text()


def test_folders_of_clients_stay_below_theirs(tmp_path):
    """Of generators of people, and of their images."""
    names = draws(9, 200)
    one = Split(ImageFiles([tmp_path / "x.png"]), np.array([1]), np.array([0]))
    clients = tuple(ClientData(name, one, np.array([0]), None, ()) for name in names)
    folders = folders_of_clients(tmp_path, FederatedData(clients, {}, (), None))
    assert [*folders] == names
    assert {os.path.dirname(os.path.abspath(folder)) for folder in folders.values()} == {str(tmp_path)}
    assert len(spellings(folders.values())) == len(names)


def test_decoded_files_stay_in_their_folder_and_share_none(tmp_path):
    found = [find(tmp_path, Wanted(name, (), (8, 4))) for name in draws(10, 200)]
    assert {os.path.dirname(os.path.abspath(path)) for path in found} == {str(tmp_path)}
    assert len(spellings(found)) == len(found)
