"""Published numbers: what the files hold, what is impossible in them, and runs beside them."""

import pytest
import yaml

from fedsim.__main__ import main
from fedsim.core.metrics import KINDS
from fedsim.papers.contradictions import impossible_numbers
from fedsim.papers.files import list_papers, read_paper
from fedsim.papers.resolved_rows import find_run, resolved_row
from run_dirs import scores_of, whole, write_log, write_run
from small import refuse

NINE = ["msmt17", "dukemtmc", "market1501", "cuhk03np", "prid2011", "cuhk01", "viper", "3dpes", "ilids"]
SETTINGS_003 = resolved_row(read_paper("003"), "table4_batch_32")


def all_rows():
    for key in list_papers():
        paper = read_paper(key)
        for table in paper.tables:
            for row in table.rows:
                yield paper, table, row


def table_of(key, name):
    return {row.name: row for row in next(t for t in read_paper(key).tables if t.name == name).rows}


def changed(name, value):
    config = yaml.safe_load(yaml.safe_dump(SETTINGS_003))
    *path, last = name.split(".")
    section = config
    for part in path:
        section = section[part]
    section[last] = value
    return config


# -- the files ---------------------------------------------------------------------------------------------------------


def test_every_row_is_complete():
    assert list_papers() == ["000", "001", "002", "003", "004", "005", "006", "007"]
    for paper, table, row in all_rows():
        where = f"{paper.key}/{table.name} {row.name}"
        assert row.status in ("ok", "impossible", "not comparable", "figure only"), where
        assert row.status == "ok" or row.note or row.copied, f"{where} has no reason"
        of_others = table.left_out or paper.key == "007"  # of methods that are not here
        assert row.runs or row.copied or not row.scores or of_others, f"{where} is neither ours nor another's"
        assert row.runs or row.status != "ok", where
        assert row.copied is None or set(row.copied) == {"from", "known"}, where
        for of_paper, name in (find_run(paper, run) for run in row.runs):
            assert name in of_paper.rows, f"{where}: {name}"
        assert bool(row.scores) == (row.status != "figure only"), where
        assert row.model in KINDS, where
        assert set(row.scores) <= set(paper.test_sets), where
        for scores in row.scores.values():
            assert scores, where
            assert set(scores) <= {"mAP", "rank1", "rank5", "rank10", "top1"}, where
            assert all(0 < value <= 100 for value in scores.values()), where
    for key in list_papers():
        for name, test_set in read_paper(key).test_sets.items():
            assert test_set.status == "ok" or test_set.note, f"{key} {name} has no reason"


ROW_FIELDS = {"client", "clients", "copied", "costs", "mean", "model", "name", "note", "run", "scores", "single",
              "spread", "status"}  # fmt: skip
TABLE_FIELDS = {"title", "columns", "digits", "add", "left_out", "notes", "clients", "rows"}


def test_files_have_known_fields_only(root):
    for path in (root / "src" / "fedsim" / "papers").glob("*.yaml"):
        for name, table in yaml.safe_load(path.read_text())["tables"].items():
            assert set(table) <= TABLE_FIELDS, f"{path.name} {name}"
            for row in table["rows"]:
                assert set(row) <= ROW_FIELDS, f"{path.name} {name} {row['name']}"


def test_table_3_of_paper_003_adds_up():
    sums = table_of("003", "table3")
    tables = {"FedPav": table_of("003", "table4")["FedPav, B = 32"], "CDW": table_of("003", "table8")["FedPav + CDW"]}
    for column, row in tables.items():
        for name in NINE:
            assert sums[column].scores[name]["rank1"] == pytest.approx(row.scores[name]["rank1"], abs=0.0101)
    expected = [53.57, 81.41, 90.36, 50.50, 62.33, 82.78, 53.48, 81.71, 82.31]
    assert [sums["CDW local model"].scores[name]["rank1"] for name in NINE] == pytest.approx(expected)


def test_what_stands_twice_in_paper_003_is_the_same():
    for name in ("market1501", "cuhk03np"):
        local = [table_of("003", table)["Local training"].scores[name] for table in ("table2", "table7")]
        assert local[0] == local[1]


def test_the_averages_in_the_text_of_paper_000_follow_from_its_table():
    rows = table_of("000", "table2")
    for other, rank1, mean_precision in (("FedBN+D", 4.98, 5.9), ("FedAvg+D", 17.05, 19.3)):
        for metric, expected in (("rank1", rank1), ("mAP", mean_precision)):
            gains = [rows["SKA"].scores[s][metric] - rows[other].scores[s][metric] for s in rows["SKA"].scores]
            assert sum(gains) / 4 == pytest.approx(expected, abs=0.051)


@pytest.mark.parametrize(("table", "row"), [("table5", "FedCAPR"), ("table7", "FedCAPR"), ("table7", "all")])
def test_what_stands_twice_in_paper_004_is_the_same_but_for_its_last_digits(table, row):
    other = {"table5": ("table2", "FedCAPR"), "table7": ("table6", row.replace("all", "FedKLPR"))}[table]
    a, b = table_of("004", table)[row].scores, table_of("004", other[0])[other[1]].scores
    assert a.keys() == b.keys()
    for name in a:
        for metric in a[name].keys() & b[name].keys():
            assert a[name][metric] == pytest.approx(b[name][metric], abs=0.0999), f"{name} {metric}"


def test_a_cell_of_paper_004_is_copied():
    unpruned, pruned = table_of("004", "table6")["FedCAPR"].scores, table_of("004", "table4")["LotteryFL"].scores
    assert [name for name in unpruned if unpruned[name] == pruned[name]] == ["dukemtmc"]


def test_gains_in_the_text_of_paper_004_follow_from_its_tables():
    four, seven = table_of("004", "table4"), table_of("004", "table7")
    for other, expected in [("SubFedAvg", (3.06, 8.07, 6.96)), ("FedDIP", (6.12, 8.72, 6.01))]:
        gains = [
            four["FedKLPR"].scores[s]["rank1"] - four[other].scores[s]["rank1"] for s in ("ilids", "cuhk03np", "viper")
        ]
        assert gains == pytest.approx(expected)
    steps = [("FedCAPR", "KLL, KLAW", (3.1, 3.2, 6.6)), ("and pruning", "all", (6.1, 6.7, 6.1))]
    for before, after, expected in steps:
        gains = [
            seven[after].scores[s]["rank1"] - seven[before].scores[s]["rank1"] for s in ("ilids", "viper", "3dpes")
        ]
        assert gains == pytest.approx(expected)


def test_table_7_of_paper_002_is_of_another_protocol_than_its_table_5():
    (whole,), generated = table_of("002", "table5").values(), table_of("002", "table7")
    for name in ("market1501", "grid"):
        assert generated["With Augmentation"].scores[name]["mAP"] > whole.scores[name]["rank1"]
    gains = [
        generated["With Augmentation"].scores[name]["mAP"] - generated["No Augmentation"].scores[name]["mAP"]
        for name in ("market1501", "grid")
    ]
    assert gains == pytest.approx([8.4, 11.8])  # the text: "from 80.3% to 88.7%"


def test_what_stands_twice_in_paper_002_is_the_same():
    """Rank-1 of the global model stands in Tables 5, 6 and 13; Tables 11 and 14 have its means, cut after 2 digits."""
    (whole,) = table_of("002", "table5").values()
    for table, row in (("table6", "Global Model"), ("table13", "Proposed Framework")):
        scores = table_of("002", table)[row].scores
        assert {name: of["rank1"] for name, of in scores.items()} == {n: of["rank1"] for n, of in whole.scores.items()}
    for metric, mean in table_of("002", "table11")["Proposed Framework"].scores["seen"].items():
        assert sum(of[metric] for of in whole.scores.values()) / 9 == pytest.approx(mean, abs=0.0101)
    proposed = [table_of("002", table)["Proposed Framework"].scores for table in ("table11", "table14")]
    assert proposed[0] == proposed[1]


def test_a_row_of_paper_002_is_that_of_paper_003_but_for_two_cells():
    ours = table_of("002", "table13")["FedReID Baseline"].scores
    theirs = table_of("003", "table8")["FedPav + CDW"].scores
    for name in ours.keys() & theirs.keys():
        assert ours[name]["rank1"] == pytest.approx(theirs[name]["rank1"], abs=0.0999), name  # cut after one digit
    assert ours.keys() - theirs.keys() == {"cuhk02", "grid"}  # which paper 003 has not


def test_the_bound_finds_exactly_the_rows_that_are_known_to_be_odd():
    found = {(p.key, t.name, name, mark) for p, t, row in all_rows() for name, mark, _ in impossible_numbers(p, row)}
    odd = {
        ("003", t, s, "~") for t in ("table4", "table5", "table6", "table7", "table8") for s in ("viper", "prid2011")
    }
    assert found == odd | {("002", "table5", "viper", "!"), ("002", "table5", "prid2011", "!")}


# -- runs beside them --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    return row_run(tmp_path / "run")


def row_run(folder, name="table4_batch_32", config=None, sets=NINE):
    """A whole run of a row of paper 003; ``config``: if it is another."""
    evaluations = {r: scores_of(dict.fromkeys(sets, r / 1000)) for r in (100, 200, 290, 300)}
    config = config or resolved_row(read_paper("003"), name)
    return write_run(folder, evaluations, config=config, **whole("003", name, config))


def compare(capsys, run, which, *options):
    assert main(["report", str(run), *options, "--compare", which]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Tables break their columns to the width of the terminal."""
    monkeypatch.setenv("COLUMNS", "160")


def line_of(text, start):
    return next(line for line in text.splitlines() if line.startswith(start))


def test_a_run_with_the_published_settings_stands_beside_its_row(run, capsys):
    text = compare(capsys, run, "papers/003")
    assert "table4: Federated model, batch size 32; mAP / rank-1 in percent" in text
    # mAP is the trapezoid: 2 / 10 of rank-1 in these scores; best3 is the mean of rounds 200, 290, 300
    cells = line_of(text, "market1501").split("  ")
    assert [cell.strip() for cell in cells if cell.strip()] == [
        "market1501", "60.68 / 83.42", "6.00 / 30.00", "5.27 / 26.33",
    ]  # fmt: skip
    assert "52.58 / 48.10~" in line_of(text, "viper")
    assert "mAP 52.58, but with one match per query it lies in 52.80 to 60.99 (rectangles)" in text
    assert "not comparable: the authors send their split on request (FedReIDBench)" in text
    assert "withdrawn by its owners in 2019" in text
    assert "- FedPav has all settings of 'FedPav, B = 32' (003/table4_batch_32)" in text
    assert "rounds 200, 290, 300" in text
    assert "NOT COMPARABLE" not in text


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("data.dry_run", True, "DRY RUN"),
        ("data.source", [{"class_path": "fedsim.data.synthetic.SyntheticReID"}], "SYNTHETIC DATA"),
        ("data.limit_client_batches", 2, "A PART OF THE DATA"),
    ],
)
def test_what_says_nothing_about_a_paper_is_marked_loudly(name, value, reason, run, capsys):
    (run / "config.yaml").write_text(yaml.safe_dump(changed(name, value)))
    text = compare(capsys, run, "003")
    assert f"NOT COMPARABLE: {run} " in text
    assert reason in text
    assert text.index("NOT COMPARABLE") < text.index("table4")
    header = text[text.index("table4") : text.index("----")]
    assert header.count("NOT COMPARABLE") == 2  # last, best3


def test_runs_without_config_or_end_are_marked(run, capsys):
    (run / "config.yaml").unlink()
    assert "holds no config.yaml" in compare(capsys, run, "003")
    write_run(run, {3: scores_of(dict.fromkeys(NINE, 0.1))}, config=SETTINGS_003, finished=False)
    text = compare(capsys, run, "003")
    assert "NOT FINISHED: it ends with round 3" in text
    assert "the paper's rule best3 is not shown" in text


def test_the_main_table_says_dry_run(run, capsys):
    (run / "config.yaml").write_text(yaml.safe_dump(changed("data.dry_run", True)))
    assert main(["report", str(run)]) == 0
    assert "DRY RUN on drawn stand-ins" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "table", "printed"),
    [
        ("table5_batch_64", "table5", "FedPav, B = 64"),
        ("table6_batch_128", "table6", "FedPav, B = 128"),
        ("table7_local", "table7", "Local training"),
        ("table8_cdw", "table8", "FedPav + CDW"),
    ],
)
def test_the_row_with_the_nearest_settings_is_found(row, table, printed, tmp_path, capsys):
    text = compare(capsys, row_run(tmp_path / "run", row), "003")
    assert f"\n{table}: " in text
    assert f"has all settings of '{printed}' (003/{row})" in text
    config = resolved_row(read_paper("003"), row)
    config["model"]["client"]["local_epochs"] = 5
    text = compare(capsys, row_run(tmp_path / "other", row, config), "003")
    assert f"is closest to '{printed}' (003/{row}); settings that differ: 1\n" in text
    assert "\n    training: model.client.local_epochs 5 (row: 1)\n" in text


@pytest.mark.parametrize(("partition", "row"), [("by_camera", "By camera"), ("by_identity", "By identity")])
def test_partitions_of_one_data_set_are_table_2(partition, row, tmp_path, capsys):
    text = compare(capsys, row_run(tmp_path / "run", f"table2_{partition}", sets=["market1501"]), "003")
    assert "\ntable2: " in text
    assert f"has all settings of '{row}' (003/table2_{partition})" in text


def test_other_clients_are_a_difference(tmp_path, capsys):
    names = [name for name in NINE if name != "dukemtmc"]
    config = changed("data.source", SETTINGS_003["data"]["source"])
    config["data"]["source"] = [s for s in config["data"]["source"] if not s["class_path"].endswith("DukeMTMC")]
    run = write_run(tmp_path / "run", {300: scores_of(dict.fromkeys(names, 0.5))}, config=config)
    text = compare(capsys, run, "003")
    assert "\n    data: data.source without DukeMTMC (row: with DukeMTMC)\n" in text
    assert line_of(text, "dukemtmc").endswith("-")


def test_clients_of_a_folder_that_has_all_data_sets_are_compared_by_name(tmp_path, capsys):
    names = [name for name in NINE if name != "dukemtmc"]
    config = changed("data.source", {"class_path": "fedsim.data.datasets.FedReIDBench", "init_args": {"root": "data"}})
    run = write_run(tmp_path / "run", {300: scores_of(dict.fromkeys(names, 0.5))}, config=config)
    text = compare(capsys, run, "003")
    assert "data: data.source [FedReIDBench] (row: [MSMT17, DukeMTMC, Market1501, CUHK03NP, PRID2011, " in text
    assert "; data.source without client dukemtmc\n" in text


def test_a_table_can_be_named_and_rank_5_shown(run, capsys):
    text = compare(capsys, run, "003/table6", "--metric", "rank5", "--rule", "last")
    assert "table6: Federated model, batch size 128; rank-5 / rank-1 in percent" in text
    assert line_of(text, "market1501").split()[1:] == ["88.32", "/", "75.50", "15.00", "/", "30.00"]
    assert "best3" not in text[text.index("table6") : text.index("----")]


def test_several_runs_stand_side_by_side_and_seeds_together(tmp_path, capsys):
    folders = []
    for seed, score in enumerate((0.2, 0.4)):
        scores = {r: scores_of(dict.fromkeys(NINE, score)) for r in (100, 200, 300)}
        folders.append(write_run(tmp_path / f"a{seed}", scores, config=SETTINGS_003, seed=seed, fingerprint="same"))
    local = changed("model.method", {"class_path": "fedsim.methods.Local"})
    scores = {300: scores_of(dict.fromkeys(NINE, 0.5), kind="personalised")}
    folders.append(write_run(tmp_path / "b", scores, config=local, method="Local", primary="personalised"))
    text = compare(capsys, folders[0], "003", *map(str, folders[1:]), "--metric", "rank1")
    fedpav, alone = text.index("\ntable4: "), text.index("\ntable7: ")
    for start, published in ((fedpav, "83.42"), (alone, "88.93")):
        row = line_of(text[start:], "market1501").split()
        assert row == ["market1501", published, "30.00+-14.14", "30.00+-14.14", "50.00"]
    assert "Local: the paper's rule best3 is not shown; it needs three evaluations" in text


def test_single_clients_stand_beside_the_papers(tmp_path, capsys):
    """Table 3 of paper 001: each client's own model on unseen data sets, of one run of Local."""
    config = resolved_row(read_paper("001"), "table3_local")
    clients = {"dukemtmc": 0.21, "market1501": 0.22, "cuhk03np": 0.23, "msmt17": 0.24}
    scores = scores_of({"viper": 0.225, "ilids": 0.4}, "personalised") | scores_of({"viper": 0.3}, "ensemble")
    scores |= scores_of(clients, "personalised")
    options = whole("001", "table3_local") | {"primary": "personalised"}
    write_run(tmp_path / "mean", {100: scores}, config=config, **options)
    assert "22.5" in line_of(compare(capsys, tmp_path / "mean", "001/table3"), "VIPeR".lower())
    for client, value in clients.items():
        scores |= scores_of({f"viper/{client}": value}, "personalised")
    run = write_run(tmp_path / "run", {100: scores}, config=config, **options)
    text = compare(capsys, run, "001/table3")
    line = line_of(text, "viper").split()
    assert line[2:4] == ["25.0", "26.1"]
    assert line[-5:] == ["21.0", "22.0", "23.0", "24.0", "30.0"]  # the four, not their mean, and the ensemble
    assert "has all settings of 'Client (Duke)' and 'Client (Market)' and" in " ".join(text.split())
    assert "market1501" in text[: text.index("\nviper")]  # in the header of its column


def test_accuracies_on_cifar10_keep_their_digits_and_their_spread(tmp_path, capsys):
    run = write_run(tmp_path / "run", {100: scores_of({"viper": 0.4567})}, config={"model": {}})
    text = compare(capsys, run, "001/table2")
    assert "90.72 ± 0.04" in line_of(text, "cifar10")
    assert "93.31 ± 0.11" in text
    assert line_of(text, "viper").split()[-1] == "45.7"


def method_run(folder, method, score, kind, **settings):
    """A run with paper 000's method and one score on Market-1501."""
    config = {"model": {"method": {"class_path": method, "init_args": settings}}, "data": {"dry_run": method == "MOON"}}
    return write_run(folder, {3: scores_of({"market1501": score}, kind)}, config=config, method=method, primary=kind)


def test_many_runs_stand_below_the_rows_that_they_are_closest_to(tmp_path, capsys):
    runs = [
        method_run(tmp_path / "a", "Ditto", 0.11, "global"),
        method_run(tmp_path / "b", "SKA", 0.12, "personalised", dual=False, unseen="avg"),
        method_run(tmp_path / "c", "MOON", 0.13, "global"),
        method_run(tmp_path / "d", "FedBN", 0.14, "personalised"),
        method_run(tmp_path / "e", "MOON", 0.15, "global", mu=5.0),
    ]
    text = compare(capsys, runs[0], "000/table2", *map(str, runs[1:]))
    lines = text[text.index("---") :].splitlines()[1:]
    lines = lines[: lines.index("")]
    told = [line.split("  ")[0].partition(" [")[0] for line in lines]  # without marks of footnotes
    at = told.index("MOON+D")
    assert told[at : at + 3] == ["MOON+D", "MOON mu 1", "MOON mu 5"]
    at = told.index("FedBN+D")  # SKA without lg is FedBN
    assert told[at : at + 3] == ["FedBN+D", "SKA dual false, unseen avg", "FedBN"]
    assert told[-1] == "Ditto"  # of which the table has nothing
    assert len(told) == 9 + len(runs)
    at = told.index("FedBN+D") + 1
    cells = [cell.strip() for cell in lines[at].split("  ") if cell.strip()]
    assert cells == ["SKA dual false, unseen avg", "personalised", "last", "-", "2.4 / 12.0", "-", "-"]
    assert "last, NOT COMPARABLE" in lines[told.index("MOON mu 1")]
    assert text.count("NOT COMPARABLE: each of MOON mu 1, MOON mu 5 is a DRY RUN") == 2


@pytest.mark.parametrize(("generated", "row"), [(False, "No Augmentation"), (True, "With Augmentation")])
def test_runs_with_and_without_generated_images_stand_beside_their_rows(generated, row, tmp_path, capsys):
    config = resolved_row(read_paper("002"), "table7_generated" if generated else "table7_no_generated")
    (clients,) = read_paper("002").tables[0].rows[0].clients
    name = "table7_generated" if generated else "table7_no_generated"
    scores = {20: scores_of(dict.fromkeys(sorted(clients), 0.4))}
    folder = write_run(tmp_path / "run", scores, config=config, **whole("002", name))
    text = compare(capsys, folder, "002/table7")
    verdict = "cannot be certified as" if generated else "has all settings of"  # images of others are not known
    assert f"{verdict} '{row}' (002/" in text
    published = {"No Augmentation": ("80.3", "47.5"), "With Augmentation": ("88.7", "59.3")}[row]
    assert published[0] in line_of(text, "market1501")
    assert published[1] in line_of(text, "grid")
    assert "\ntable7: " in compare(capsys, folder, "002")


def test_what_clients_prune_and_send_stands_beside_what_is_printed(tmp_path, capsys):
    """Of two runs: 2 GiB in a round of three, and half as much; all downloads and uploads of a client."""
    gib = 2.0**30
    folders = []
    for seed, share in ((0, 1.0), (1, 0.5)):
        folder = tmp_path / str(seed)
        config = {"model": {"method": {"class_path": "fedsim.methods.FedKLPR", "init_args": {"prune": True}}}}
        rows = scores_of({"viper": 0.6}, "local")
        write_run(folder, {3: rows}, config=config, method="FedKLPR", primary="local", fingerprint="same", seed=seed)
        bytes_ = {"comm/viper/up_bytes": share * gib, "comm/viper/down_bytes": share * gib / 2}
        lines = [(t, bytes_ | {"comm/viper/density": 1 - 0.1 * t}) for t in (1, 2, 3)] + [(3, rows)]
        write_log(folder / "metrics.csv", lines)
        folders.append(str(folder))
    text = compare(capsys, folders[0], "004/table3", folders[1])
    costs = text[text.index("table3: pruned, percent") :]
    header, row = costs[: costs.index("---")], line_of(costs, "viper")
    assert [name in header for name in ("LotteryFL", "SubFedAvg", "FedDIP", "FedKLPR")] == [True] * 4
    assert "12.03 / 2.99" in row
    assert "70.52 / 2.64" in row
    assert "65.00 / 2.29" in row
    assert "30.00+-0.00 / 3.38+-1.59" in row
    assert line_of(costs, "cuhk01").rstrip().endswith("-")  # no such client


def test_printed_costs_are_of_the_rows_own_clients():
    rows = [row for table in read_paper("004").tables for row in table.rows if row.costs]
    assert len(rows) == 18
    for row in rows:
        assert row.costs.keys() == row.scores.keys()
        assert all(0 <= numbers[0] < 100 and len(numbers) <= 2 for numbers in row.costs.values())


def test_figures_have_no_numbers(run, capsys):
    text = compare(capsys, run, "003/figures")
    assert "FedPav + KD + CDW: figure only, no numbers are printed; Figures 8, 13, 14" in text


def test_wrong_comparisons_are_one_line(run, tmp_path, capsys):
    assert "choose from 000, 001, 002, 003" in refuse(capsys, "report", run, "--compare", "099")
    assert "choose from table2" in refuse(capsys, "report", run, "--compare", "003/table9")
    assert "has no mINP" in refuse(capsys, "report", run, "--compare", "003", "--metric", "mINP")
    other = write_run(tmp_path / "other", {1: scores_of({"town0": 0.5})}, config=SETTINGS_003)
    assert "has none of the test sets" in refuse(capsys, "report", other, "--compare", "003/table4")
