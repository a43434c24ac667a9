"""Papers 005 to 007: every printed digit, written down a second time; contradictions; what rows resolve to."""

import re
from itertools import combinations

import pytest

from fedsim.__main__ import main
from fedsim.papers.contradictions import Cell, contradictions_in, differing_sets, lines_of, wrong_mean
from fedsim.papers.files import read_paper
from fedsim.papers.resolved_rows import resolved_row

PAPERS = ("005", "006", "007")
PRINTED = {  # as in the tables: mAP / rank-1 of Market-1501, MSMT17 and CUHK03
    "005/table1": """
        Single (1) 23.3/47.5, 2.7/8.8, 18.0/18.5. Single (2) 13.2/31.1, 1.7/6.0, 21.6/22.5.
        Single (3) 18.9/41.2, 3.3/10.0, 10.2/11.2.
        MOON 26.8/51.1, 4.8/14.5, 20.9/22.5. SCAFFOLD 26.0/50.5, 5.3/15.8, 22.9/26.0.
        FedPav 25.4/49.4, 5.2/15.5, 22.5/24.3.
        FedReID 30.1/53.7, 4.5/13.7, 26.4/26.5. MixStyle 31.2/53.5, 5.5/16.0, 28.6/31.5.
        CrossStyle 32.5/59.6, 4.6/14.0, 27.8/28.0.
        SNR 32.7/59.4, 5.1/15.3, 28.5/30.0. DACS 36.3/61.2, 10.4/27.5, 30.7/34.1.
        SNR+DACS 37.7/65.9, 11.6/29.4, 33.6/37.5.
        Joint 32.2/58.6, 5.6/16.3, 29.5/29.0. FedPav (ViT) 37.4/62.6, 14.6/33.7, 23.7/25.0.
        CrossStyle (ViT) 41.4/65.8, 17.9/40.8, 31.0/38.4. DACS (ViT) 45.4/70.7, 20.3/44.2, 36.6/42.1.""",
    "005/table2": """
        Baseline 25.4/49.4, -, 22.5/24.3. RS 25.1/50.6, -, 20.4/22.8. DC 31.9/57.1, -, 29.1/30.0.
        AC 34.5/59.7, -, 27.3/28.0.
        DACS 36.3/61.2, -, 30.7/34.1.""",
    "005/table3": """
        JSD 34.2/58.8, -, 29.1/32.8. KL 33.6/56.8, -, 28.0/30.4. channel level 30.0/55.4, -, 25.1/25.5.
        H(G(x)) < H(G(x')) alone 33.3/58.4, -, 27.0/29.2. H(G(x')) < H(L(x')) alone 34.6/59.0, -, 26.7/28.6.""",
    "005/supp1": """
        FedPav, MS+C3 24.8/48.6, -, -. SNR, MS+C3 29.1/54.0, -, -. DACS, MS+C3 31.8/56.6, -, -.
        FedPav, MS+C2 25.8/50.4, -, 21.4/24.5. SNR, MS+C2 29.8/54.8, -, 26.1/26.5. DACS, MS+C2 32.0/57.1, -, 27.9/30.5.
        FedPav, MS+M -, -, 19.9/18.5. SNR, MS+M -, -, 20.4/21.0. DACS, MS+M -, -, 23.8/25.4.
        FedPav, three sources 25.4/49.4, -, 22.5/24.3. SNR, three sources 30.4/56.5, -, 28.5/30.0.
        DACS, three sources 36.3/61.2, -, 30.7/34.1.""",
    "005/supp2": """
        TM(1) 52.0/80.1, 14.6/46.1, 22.5/23.7, 29.7/50.0. TM(2) 33.3/67.6, 13.1/40.7, 45.6/56.0, 30.7/54.8.
        TM(3) 32.6/63.8, 18.4/47.3, 21.4/22.2, 24.1/44.4. Avg 39.3/70.5, 15.4/44.0, 29.8/34.0, 28.2/49.7.
        Fed-TM 46.5/74.2, 16.4/45.8, 41.3/48.0, 34.7/56.0. Fed-TM-DACS 52.4/80.9, 20.8/54.7, 43.2/50.2, 38.8/61.9.""",
    "006/table1": """
        SCAFFOLD 26.0/50.5, 5.3/15.8, 22.9/26.0, 18.1/30.8. MOON 26.8/51.1, 4.8/14.5, 20.9/22.5, 17.5/29.4.
        SNR 32.7/59.4, 5.1/15.3, 28.5/30.0, 22.1/34.9. MixStyle 31.2/53.5, 5.5/16.0, 28.6/31.5, 21.8/33.7.
        CrossStyle 35.5/59.6, 4.6/14.0, 27.8/28.0, 22.6/33.9. FedProx 29.3/53.8, 5.8/17.4, 19.1/17.7, 18.1/29.6.
        FedPav 25.4/49.4, 5.2/15.5, 22.5/24.3, 17.7/29.7. FedReID 30.1/53.7, 4.5/13.7, 26.4/26.5, 20.3/31.3.
        DACS 36.3/61.2, 10.4/27.5, 30.7/34.1, 25.8/40.9. SSCU 39.5/66.4, 11.9/32.3, 32.8/34.1, 28.1/44.3.
        FedSupWA 42.0/68.9, 12.4/33.4, 36.1/36.6, 30.2/46.3. FedPav (ViT) 32.5/56.0, 13.6/32.6, 25.1/24.0, 23.7/37.5.
        CrossStyle (ViT) 30.9/55.1, 16.8/39.9, 19.2/18.2, 22.3/32.0.
        DACS (ViT) 38.3/63.7, 17.3/39.9, 29.1/28.8, 28.2/44.1.
        SSCU (ViT) 46.3/69.6, 20.0/43.7, 31.5/31.6, 32.6/48.3.
        FedSupWA (ViT) 48.0/71.4, 20.1/43.7, 34.9/35.0, 34.3/50.0.""",
    "007/table1": """
        SSCU (ViT) 46.3/69.6, 20.0/43.7, 33.7/33.4. SSCU+PFTS (ViT) 48.9/72.4, 21.3/46.0, 35.5/35.8.
        SSCU+BAPM (ViT) 49.1/73.4, 23.4/49.5, 37.4/38.4.""",
    "007/ablation": """
        SSCU (ViT) -, 20.0/43.7, -. SSCU (ViT), holistic only -, 22.9/48.2, -. SSCU (ViT), parts only -, 22.7/48.5, -.
        SSCU+BAPM (ViT) -, 23.4/49.5, -.""",
    "007/gains": "",
}  # fmt: skip
NUMBERS = r"(?:\d+\.\d/\d+\.\d|-)"


def printed(text):
    """Name -> cells, each of two numbers or none."""
    rows = re.findall(rf"(\S.*?) ({NUMBERS}(?:, {NUMBERS})+)\.(?=\s|$)", text)
    return {name: [None if cell == "-" else tuple(map(float, cell.split("/"))) for cell in cells.split(", ")]
            for name, cells in rows}  # fmt: skip


def left_out_tables():
    return {f"{key}/{table.name}": table for key in PAPERS for table in read_paper(key).tables if table.left_out}


@pytest.mark.parametrize("place", PRINTED)
def test_every_printed_digit_is_there(place):
    table, expected = left_out_tables()[place], printed(PRINTED[place])
    sets = ["market1501", "msmt17", "cuhk03" if place[:3] == "005" else "cuhk03np"]
    assert {row.name for row in table.rows if row.scores} == set(expected)
    for row in table.rows:
        if row.scores:
            cells = [tuple(row.scores[name].values()) if name in row.scores else None for name in sets]
            assert cells + ([row.mean] if row.mean else []) == expected[row.name], row.name
            assert all([*scores] == ["mAP", "rank1"] for scores in row.scores.values())


def test_every_table_of_left_out_sets_is_written_down_twice():
    assert set(left_out_tables()) == set(PRINTED)
    assert [len(printed(text)) for text in PRINTED.values()] == [16, 5, 5, 12, 6, 16, 3, 4, 0]


def test_rows_without_a_run_say_why_and_no_row_is_a_target():
    for table in left_out_tables().values():
        for row in table.rows:
            assert row.status in ("not comparable", "figure only")
            assert row.remark


def same_names(papers):
    """All pairs of rows with one name; SNR with three sources is SNR elsewhere."""
    cells = [
        Cell(f"{paper.key}/{table.name}", row, table.digits)
        for paper in papers
        for table in paper.tables
        if table.left_out
        for row in table.rows
    ]
    for first, second in combinations(cells, 2):
        names = {cell.row.name.removesuffix(", three sources") for cell in (first, second)}
        if len(names) == 1 and first.place != second.place:
            yield first, second


def test_contradictions_are_exactly_the_cells_that_differ():
    """Rows of one name in two tables, of which some number differs, are listed; and no others."""
    papers = [read_paper(key) for key in PAPERS]
    listed = {}
    for paper in papers:
        for (first, second), data_sets, note in contradictions_in(paper):
            assert data_sets
            assert note
            listed[first.place, first.row.name, second.place, second.row.name] = data_sets
    found = {}
    for first, second in same_names(papers):
        if data_sets := differing_sets(first.row.scores, second.row.scores):
            pair = sorted(
                [(first.place, first.row.name), (second.place, second.row.name)], key=lambda cell: cell[0][:3]
            )
            found[(*pair[0], *pair[1])] = data_sets
    also = ("005/supp1", "SNR, three sources", "006/table1", "SNR")  # 006 has the number of 005's Table 1
    assert found.pop(also) == ["market1501"]
    assert found == listed


def test_contradictions_stand_side_by_side(capsys):
    lines = {key: list(lines_of(read_paper(key))) for key in PAPERS}
    assert lines["005"][0] == (
        "market1501: 005/table1, SNR: 32.7 / 59.4; 005/supp1, SNR, three sources: 30.4 / 56.5 "
        "(the paper contradicts itself)"
    )
    assert [line for line in lines["006"] if "45.4 / 70.7" in line and "38.3 / 63.7" in line]
    assert [line for line in lines["006"] if "41.4 / 65.8" in line and "30.9 / 55.1" in line]
    assert [line for line in lines["007"] if "31.5 / 31.6" in line and "33.7 / 33.4" in line]
    for key in PAPERS:
        assert main(["papers", key]) == 0
        text = capsys.readouterr().out
        assert all(f"  {line}" in text.splitlines() for line in lines[key])


def test_printed_means_are_those_of_their_columns_but_for_two():
    wrong = {(place, row.name): wrong_mean(row) for place, table in left_out_tables().items() for row in table.rows}
    assert {where: text for where, text in wrong.items() if text} == {
        ("005/supp2", "Avg"): "28.2 / 49.7 is printed, its columns give 28.2 / 49.5",
        ("006/table1", "CrossStyle (ViT)"): "22.3 / 32.0 is printed, its columns give 22.3 / 37.7",
    }
    rows = {row.name: row.scores["msmt17"]["rank1"] for row in left_out_tables()["005/supp2"].rows}
    assert sum(rows[f"TM({k})"] for k in (1, 2, 3)) / 3 == pytest.approx(44.7, abs=0.05)  # printed in Avg: 44.0


def test_a_paper_prints_every_row_of_its_tables(capsys):
    for place, text in PRINTED.items():
        assert main(["papers", place[:3]]) == 0
        lines = (
            capsys.readouterr().out.partition(f"\n{place}: ")[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()
        )
        shown = {re.split(r" {2,}", line)[0]: re.split(r" {2,}", line)[1:] for line in lines[2:]}
        for name, cells in printed(text).items():
            numbers = [f"{a:.1f} / {b:.1f}" for a, b in filter(None, cells)]
            assert [cell for cell in shown[name] if re.fullmatch(r"\d+\.\d / \d+\.\d", cell)] == numbers
            assert "not comparable" in shown[name]


def test_versions_of_data_sets_are_named(capsys):
    expected = {
        "005": ["open-reid's format, boxes of both kinds, split 0", "32,621 training images"],
        "006": ["new protocol, boxes by hand", "32,621 or 30,248 training images"],
        "007": ["SSCU's own release reads those of the detector"],
    }
    for key, texts in expected.items():
        assert main(["papers", key]) == 0
        text = " ".join(capsys.readouterr().out.partition("data sets, as the paper has them:")[2].split())
        assert [words for words in texts if words not in text] == []


@pytest.mark.parametrize("key", PAPERS)
def test_rows_have_the_settings_of_the_releases(key):
    paper = read_paper(key)
    for name in paper.rows:
        config = resolved_row(paper, name)
        model, data = config["model"], config["data"]
        client, optimizer = model["client"], model["client"]["optimizer"]["init_args"]
        assert (data["val"], data["val_fraction"]) == ("identities", 0.1)
        assert (client["local_steps"], client["num_instances"]) == (200, 4)
        assert optimizer["lr"] == 1e-3
        assert optimizer["weight_decay"] == 5e-4
        assert optimizer["momentum"] == (0.0 if key == "005" and re.search("fedpav(?!_mom)|scaffold", name) else 0.9)
        assert client["batch_size"] == (192 if "joint" in name else 16 if key == "007" else 64)
        assert client["schedule"]["milestones"] == ([20, 40] if key == "006" else [20, 30])
        assert client["schedule"]["gamma"] == 0.5
        rounds = {"005": 41, "006": 70 if "sscu" in name else 61, "007": 101}
        assert config["trainer"]["max_epochs"] == rounds[key]
        assert (client["sampler"], client["positives"]) == ("people", "other_cameras")
        assert model["objective"]["margin"] == 0.5
        has_snr = "snr" in name or (key == "006" and "fedprox" not in name)  # unit length at test
        assert model["evaluation"]["distance"] == ("cosine" if has_snr else "euclidean")
        assert model["objective"]["triplet"] == (0.0 if "snr" in name else 1.0)
        assert model["head"] == {"bias": key == "006", "init": "torch"}
        assert config["seed_everything"] == 1
        (left_out,) = data["unseen"]
        assert name.endswith(f"_{left_out}")
