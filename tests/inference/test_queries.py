"""Single queries and domain confusion of a run, against plain loops over its features; what is refused."""

import csv
import math
import os
import re
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import fedsim
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.evaluation.ranking import RetrievalLabels
from fedsim.inference.queries import count_first_images, joined_labels
from fedsim.inference.run_features import read_run_features
from fedsim.report.features import confusion_matrices
from runs_of_sites import SETS, runs_of_sites
from sites import QUERY
from small import refuse


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return runs_of_sites(tmp_path_factory.mktemp("queries"))


@pytest.fixture
def results(folder):
    return fedsim.load_run(folder / "pav")


def by_loops(path, others=()):
    """Query's file -> (its list as (gallery's file, cosine distance, match), AP, rank of the first match)."""
    files = [np.load(part) for part in (path, *others)]
    query, lists = files[0], {}
    for q, name in enumerate(query["query_files"].tolist()):
        listed = []
        for number, gallery in enumerate(files):
            for g, other in enumerate(gallery["gallery_files"].tolist()):
                pid, same = int(gallery["gallery_pids"][g]), number == 0
                is_match = same and pid == query["query_pids"][q]
                in_camera = gallery["gallery_camids"][g] == query["query_camids"][q]
                if pid != -1 and not (is_match and in_camera):
                    a, b = query["query"][q].astype(float), gallery["gallery"][g].astype(float)
                    cosine = float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
                    listed.append((1 - cosine, other, is_match))
        listed.sort(key=lambda image: image[0])
        ranks = [rank for rank, image in enumerate(listed, start=1) if image[2]]
        precision = sum(j / rank for j, rank in enumerate(ranks, start=1)) / len(ranks) if ranks else math.nan
        lists[os.path.basename(name)] = (listed, precision, ranks[0] if ranks else 0)
    return lists


def check_rows(rows, loops, top):
    """Rows of one set are those of plain loops; equal distances may stand in another order."""
    for name in dict.fromkeys(row["query"] for row in rows):
        listed, precision, first = loops[name]
        of_query = [row for row in rows if row["query"] == name]
        assert [row["rank"] for row in of_query] == list(range(1, min(top, len(listed)) + 1))
        assert [row["distance"] for row in of_query] == pytest.approx([image[0] for image in listed[:top]], abs=1e-5)
        kinds = {os.path.basename(image[1]): (image[0], image[2]) for image in listed}
        for row in of_query:
            distance, is_match = kinds[row["image"]]
            assert row["is match"] == is_match, "junk is in no list"
            assert row["distance"] == pytest.approx(distance, abs=1e-5)
            assert row["AP"] == pytest.approx(precision, abs=1e-6, nan_ok=True)
            assert row["first match"] == first
            assert row["image"].startswith(f"{row['identity of image']:04d}_c{row['camera of image']}")
            assert row["query"].startswith(f"{row['identity']:04d}_c{row['camera']}")


@pytest.mark.parametrize("chosen", ["worst", "best"])
def test_the_worst_and_the_best_queries_are_those_of_plain_loops(folder, results, chosen):
    rows = results.queries(chosen, num=3, top=4)
    assert [*dict.fromkeys(row["data set"] for row in rows)] == sorted(SETS)
    for name in SETS:
        of_set, loops = [row for row in rows if row["data set"] == name], by_loops(folder / f"pav/features/{name}.npz")
        check_rows(of_set, loops, 4)
        shown = [of_set[place]["AP"] for place in range(0, len(of_set), 4)]
        scores = sorted((loop[1] for loop in loops.values() if loop[2]), reverse=chosen == "best")
        assert len(shown) == 3
        assert shown == pytest.approx(scores[:3], abs=1e-6)
        assert {(row["model"], row["owner"]) for row in of_set} == {("global", "")}


def test_named_queries_are_shown_also_without_a_match(folder, results):
    names = ["0012_c1s1_2.png", "0099_c1s1_9.png"]
    rows = results.queries(names, top=50)
    for name in SETS:
        of_set = [row for row in rows if row["data set"] == name]
        assert {row["query"] for row in of_set} == set(names)
        check_rows(of_set, by_loops(folder / f"pav/features/{name}.npz"), 50)
    assert all(math.isnan(row["AP"]) == row["query"].startswith("0099") for row in rows)
    assert {row["data set"] for row in results.queries(["0016_c1s1_2.png"])} == {"harbour"}, "the others have no 16"


def borders(picture, num_columns):
    """The kind of border of each image of a picture, row by row: True of a match, False of another, None of a query."""
    pixels = np.asarray(picture)
    black = (pixels[:, 1] == 0).all(axis=1)
    tops = [y for y in range(20, len(black) - 20) if black[y : y + 20].all() and not black[y - 1]]
    pitch, kinds = (pixels.shape[1] - 12) // (num_columns + 1), []
    for top in tops:
        colours = [tuple(pixels[top + 1, j * pitch + 12 + 1].tolist()) for j in range(1, num_columns + 1)]
        kinds.append([None, *({(0, 158, 115): True, (213, 94, 0): False}[colour] for colour in colours)])
    return kinds


def test_pictures_show_matches_and_other_images_by_their_borders(results):
    rows, pictures = results.queries("worst", num=9, top=5), results.draw_queries("worst", num=9, top=5)
    assert [*pictures] == sorted(SETS)
    for name, picture in pictures.items():
        matches = [bool(row["is match"]) for row in rows if row["data set"] == name]
        assert borders(picture, 5) == [[None, *matches[q : q + 5]] for q in range(0, len(matches), 5)]
    assert {bool(row["is match"]) for row in rows} == {True, False}


def test_pictures_name_files_cameras_distances_and_the_data_set(results, monkeypatch):
    drawn = []
    monkeypatch.setattr("fedsim.inference.queries.draw_rows", lambda *args: drawn.append(args))
    results.draw_queries(["0012_c1s1_2.png"], top=2)
    rows = results.queries(["0012_c1s1_2.png"], top=2)
    for number, (lists, query, gallery, captions) in enumerate(drawn):
        first, second = rows[2 * number : 2 * number + 2]
        assert captions.heading == f"data set {first['data set']}, model global, named queries, round 1"
        score = f"AP {100 * first['AP']:.1f} %\nmatch at {first['first match']}"
        assert captions.query == [f"0012_c1s\n1_2.png\n12 c1\n{score}"], "a long name is broken"
        listed = []
        for row in (first, second):
            shown = f"{row['identity of image']} c{row['camera of image']}\ndistance {row['distance']:.3f}"
            listed.append(f"{row['image'][:8]}\n{row['image'][8:]}\n{shown}")
        assert captions.listed == [listed]
        assert [path.name for path in query.locations()] == ["0012_c1s1_2.png"]
        assert [gallery.locations()[i].name for i in lists.index[0]] == [first["image"], second["image"]]


def test_long_names_are_broken_and_those_of_images_without_files_are_positions(results):
    from fedsim.data.images import ImageArray
    from fedsim.inference.queries import _broken
    from fedsim.inference.run_features import names_of

    assert _broken("0001_c1s1_001051_00.jpg").replace("\n", "") == "0001_c1s1_001051_00.jpg"
    assert max(map(len, _broken("x" * 100 + "\n").splitlines())) <= 14
    assert names_of(ImageArray(np.zeros((2, 4, 4, 3), np.uint8)), "query") == ["query 0", "query 1"]


def test_euclidean_distances_are_those_of_loops(folder, tmp_path):
    run = shutil.copytree(folder / "pav", tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("distance: cosine", "distance: euclidean"))
    rows = fedsim.load_run(run).queries(["0012_c1s1_2.png"], top=6)
    for name in SETS:
        file = np.load(run / "features" / f"{name}.npz")
        [q] = [i for i, path in enumerate(file["query_files"]) if path.endswith("0012_c1s1_2.png")]
        names = [os.path.basename(path) for path in file["gallery_files"].tolist()]
        shown = [row for row in rows if row["data set"] == name]
        for row in shown:
            difference = file["query"][q].astype(float) - file["gallery"][names.index(row["image"])]
            assert row["distance"] == pytest.approx(math.sqrt(float(difference @ difference)), rel=1e-5)
        assert [row["distance"] for row in shown] == sorted(row["distance"] for row in shown)


# -- domain confusion --------------------------------------------------------------------------------------------------


def confused(paths):
    """(data set, first image's data set, its camera, match) -> queries, of files of features whose galleries join."""
    counts = Counter()
    for name, path in paths.items():
        others = {other: part for other, part in paths.items() if other != name}
        for listed, _, first in by_loops(path, others.values()).values():
            if first:
                _, image, is_match = listed[0]
                camera = int(os.path.basename(image).split("_c")[1][0])
                counts[name, image.split("/")[-3], camera, int(is_match)] += 1
    return counts


def counted(rows):
    keys = ("data set", "first image's data set", "first image's camera", "is match")
    return {tuple(row[key] for key in keys): row["queries"] for row in rows}


def test_confusion_is_that_of_plain_loops(folder, results):
    rows = results.confusion()
    assert counted(rows) == confused({name: folder / f"pav/features/{name}.npz" for name in SETS})
    assert {(row["model"], row["owner"]) for row in rows} == {("global", "")}


def test_features_of_two_widths_are_not_joined(folder, tmp_path, capsys):
    run = shutil.copytree(folder / "pav", tmp_path / "pav", symlinks=True)
    path = run / "features" / f"{SETS[0]}.npz"
    content = {**np.load(path)}
    np.savez(path, **content | {part: content[part][:, 1:] for part in ("query", "gallery")})
    width = content["query"].shape[1]
    line = refuse(capsys, "report", run, "--confusion")
    assert f"confusion: the features of global have {width - 1} and {width} numbers in different test sets" in line


def test_a_personalised_model_joins_the_sets_of_its_client_and_the_unseen_ones(folder):
    rows = fedsim.load_run(folder / "local").confusion()
    features = folder / "local" / "features"
    for client in ("park", "station"):
        paths = {client: features / f"{client}.npz", "harbour": features / f"harbour@{client}.npz"}
        assert counted(row for row in rows if row["owner"] == client) == confused(paths)
    [matrix] = confusion_matrices(rows)
    assert matrix.model == "personalised"
    apart = {
        (a, b)
        for a in matrix.sets
        for b in matrix.sets
        if np.isnan(matrix.by_set)[matrix.sets.index(a), matrix.sets.index(b)]
    }
    assert apart == {("park", "station"), ("station", "park")}, "no model has both galleries"


def test_a_matrix_has_the_sums_of_its_rows(results):
    rows = results.confusion()
    [matrix] = confusion_matrices(rows)
    for place, name in enumerate(matrix.sets):
        of_set = [row for row in rows if row["data set"] == name]
        number = sum(row["queries"] for row in of_set)
        assert matrix.queries[place] == number
        assert matrix.right[place] == sum(row["queries"] for row in of_set if row["is match"])
        for column, other in enumerate(matrix.sets):
            wrong = sum(r["queries"] for r in of_set if not r["is match"] and r["first image's data set"] == other)
            assert matrix.by_set[place, column] == pytest.approx(100 * wrong / number)
        for column, (other, camera) in enumerate(matrix.cameras):
            keys = {"first image's data set": other, "first image's camera": camera, "is match": 0}
            of_camera = [row["queries"] for row in of_set if keys.items() <= row.items()]
            assert matrix.wrong[place, column] == sum(of_camera)


def test_the_heat_map_shows_the_matrix(results):
    [matrix], axes = confusion_matrices(results.confusion()), results.plot_confusion()
    [mesh] = axes.collections
    np.testing.assert_allclose(mesh.get_array(), 100 * matrix.wrong / matrix.queries[:, None])
    assert [text.get_text() for text in axes.get_xticklabels()] == [f"{name} c{c}" for name, c in matrix.cameras]
    assert [text.get_text() for text in axes.get_yticklabels()] == matrix.sets


def test_joined_labels_keep_people_of_two_sets_apart_unless_they_are_common():
    parts = [
        RetrievalLabels(np.array([1, 5]), np.array([0, 0]), np.array([1, -1, 0, 5]), np.array([0, 0, 0, 1])),
        RetrievalLabels(np.array([1]), np.array([0]), np.array([1, 1, 0]), np.array([0, 1, 0]), own=np.array([1])),
    ]
    first, second = joined_labels(parts, has_common=False)
    assert [x.tolist() for x in first.positives_and_junk(0)] == [[], [0]]
    assert [x.tolist() for x in first.positives_and_junk(1)] == [[3], []]
    assert [x.tolist() for x in second.positives_and_junk(0)] == [[], [4, 5]], "the same camera; the query itself"
    assert first.junk_columns.tolist() == second.junk_columns.tolist() == [1]
    first, _ = joined_labels(parts, has_common=True)
    assert [x.tolist() for x in first.positives_and_junk(0)] == [[4, 5], [0]], "cameras of two sets are two cameras"


# -- fedsim report -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(folder, tmp_path):
    return shutil.copytree(folder / "pav", tmp_path / "run")


def test_report_writes_pictures_rows_and_tables(run, results, capsys):
    assert main(["report", str(run), "--queries", "worst", "--confusion"]) == 0
    said = capsys.readouterr().out
    names = {path.name for path in (run / "queries").iterdir()}
    assert names == {f"{name}.{suffix}" for name in (*SETS, "confusion") for suffix in ("csv", "png")}
    for name in SETS:
        rows = [row for row in results.queries("worst") if row["data set"] == name]
        with (run / "queries" / f"{name}.csv").open() as file:
            about = {"round": "1", "chosen": "worst"}
            assert list(csv.DictReader(file)) == [about | {k: str(value) for k, value in row.items()} for row in rows]
        for row in (row for row in rows if row["rank"] == 1):
            cells = [row["query"], f"{row['identity']}", f"c{row['camera']}", f"{100 * row['AP']:.1f}"]
            first = [str(row["first match"]), row["image"], str(row["identity of image"])]
            cells += [*first, f"c{row['camera of image']}", f"{row['distance']:.3f}"]
            assert [*cells, "yes" if row["is match"] else "no"] in [line.split() for line in said.splitlines()]
    [matrix] = confusion_matrices(results.confusion())
    for place, name in enumerate(matrix.sets):
        shares = [100 * matrix.right[place] / matrix.queries[place], *matrix.by_set[place]]
        line = [name, str(matrix.queries[place]), *(f"{share:.1f}" for share in shares)]
        assert line in [line.split() for line in said.splitlines()]
    assert main(["report", str(run), "--queries", "[0016_c1s1_2.png]"]) == 0
    assert {path.stem for path in (run / "queries").iterdir()} == {"harbour", "confusion"}, "an earlier choice is gone"
    assert main(["report", str(run), "--queries", "[0016_c1s1_2.png, none.png]"]) == 2
    assert {path.stem for path in (run / "queries").iterdir()} == {"harbour", "confusion"}, "a refusal removes nothing"


def test_features_are_written_first_if_there_are_none_or_older_ones(run, capsys, caplog):
    shutil.rmtree(run / "features")
    assert main(["report", str(run), "--queries", "best", "--format", "csv"]) == 0
    assert capsys.readouterr().out.startswith("run,model,rule"), "standard output has the tables only"
    assert "writing features of the test sets first" in caplog.text
    assert "checkpoints/last.ckpt: round 1, last" in caplog.text
    caplog.clear()
    written = {path: path.stat().st_mtime_ns for path in (run / "features").iterdir()}
    assert main(["report", str(run), "--queries", "best"]) == 0
    assert "writing features" not in caplog.text
    assert {path: path.stat().st_mtime_ns for path in (run / "features").iterdir()} == written
    os.utime(run / "features" / "park.npz", (1, 1))
    assert main(["report", str(run), "--confusion"]) == 0
    assert "writing features" in caplog.text


def test_features_of_a_run_of_several_ranks_are_written_by_one(run):
    shutil.rmtree(run / "features")
    for config in (run / "config.yaml", *(run / "checkpoints").glob("last.ckpt/v*/config.yaml")):
        text = config.read_text().replace("  devices: 1", "  devices: 2")
        config.write_text(text.replace("ranks_per_device: 1", "ranks_per_device: 2"))
    assert main(["report", str(run), "--queries", "worst"]) == 0
    assert {path.stem for path in (run / "features").glob("*.npz")} == set(SETS)


def test_the_page_has_the_tables_and_the_pictures(run, tmp_path):
    pytest.importorskip("plotly", reason="the extra 'report' is not installed")
    pytest.importorskip("jinja2", reason="the extra 'report' is not installed")
    page = tmp_path / "page.html"
    assert main(["report", str(run), "--html", str(page)]) == 0
    assert "Single queries" not in page.read_text()
    assert main(["report", str(run), "--queries", "worst", "--confusion", "--html", str(page)]) == 0
    text = page.read_text()
    assert text.count('<figure class="wide"><img src="data:image/webp') == len(SETS) + 1
    rows = fedsim.load_run(run).queries("worst", top=1)
    assert all(f">{row['query']}</td>" in text and f">{row['distance']:.3f}</td>" in text for row in rows)
    (run / "queries" / "park.csv").write_text("query,AP\na,b\n")
    assert main(["report", str(run), "--html", str(page)]) == 2


@pytest.mark.parametrize("case", ["gone", "renamed"])
def test_a_set_whose_images_are_others_is_left_out_with_a_line(run, folder, tmp_path, caplog, case):
    data = shutil.copytree(folder / "data", tmp_path / "data")
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(str(folder / "data"), str(data)))
    words = ["report", str(run), "--queries", "worst"]
    assert main(words) == 0, "images may lie elsewhere"
    shutil.rmtree(run / "queries")
    first, line = next((data / "park" / QUERY).iterdir()), f"left out: {run / 'features' / 'park.npz'}: is of other"
    if case == "gone":
        first.unlink()
        line = "5 queries and 15 gallery images, now 4 and 15; bring the images back, or repeat fedsim predict"
    else:
        first.rename(first.with_name(first.name.replace("s1", "s9")))
    assert main(words) == 0
    assert line in caplog.text
    assert {path.stem for path in (run / "queries").iterdir()} == {"station", "harbour"}


def test_a_set_whose_features_are_not_finite_is_left_out_with_a_line(run, caplog):
    path = run / "features" / "park.npz"
    with np.load(path) as file:
        content = dict(file)
    name = next(name for name, array in content.items() if array.ndim == 2 and array.dtype.kind == "f")
    content[name][0, 0] = np.nan
    np.savez(path, **content)
    assert main(["report", str(run), "--queries", "worst", "--confusion"]) == 0
    assert "left out: park: features of global are not finite" in caplog.text


def test_a_set_without_any_match_is_left_out_of_confusion_with_a_line(results, caplog):
    features = read_run_features(results._run)
    park, *others = sorted(features.models, key=lambda model: model.data_set != "park")
    bare = replace(park, labels=replace(park.labels, query_pids=park.labels.query_pids + 1000))
    rows = count_first_images(replace(features, models=[*others, bare]))
    assert rows == count_first_images(replace(features, models=others))
    assert "left out: confusion: no query of park has a match: no identity of the queries is in" in caplog.text
    assert len(confusion_matrices(rows)[0].sets) == 2


def test_what_cannot_be_drawn_is_left_out_with_a_line(run, folder, tmp_path, caplog):
    bare = shutil.copytree(folder / "local", tmp_path / "bare")
    for name in ("features", "checkpoints"):
        shutil.rmtree(bare / name)
    for name in SETS[1:]:
        (run / "features" / f"{name}.npz").unlink()
    assert main(["report", str(run), str(bare), "--queries", "worst", "--confusion"]) == 0
    assert f"left out: {bare}: has no features, and no checkpoint" in caplog.text
    assert "left out: confusion: no model has features of two test sets" in caplog.text
    assert {path.name for path in (run / "queries").iterdir()} == {"park.csv", "park.png"}


@pytest.mark.parametrize(
    "case", ["no checkpoint", "no config", "unknown", "classifies", "one set", "no run", "no class"]
)
def test_a_problem_is_one_line(run, tmp_path, capsys, case):
    words, line = ["--queries", "worst"], ""
    if case == "no checkpoint":
        shutil.rmtree(run / "checkpoints")
        shutil.rmtree(run / "features")
        line = f"{run}: has no features, and no checkpoint to compute them; fit it with checkpoints"
    elif case == "no config":
        (run / "config.yaml").unlink()
        line = f"{run}: holds no config.yaml, so its images are unknown; give a run of fedsim fit"
    elif case == "unknown":
        words = ["--queries", "[0012_c1s1_2.png, 0012_c1s1_3.png]"]
        line = "queries: no test set has the query 0012_c1s1_3.png; did you mean 0012_c1s1_2.png?"
    elif case == "classifies":
        config = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(config.replace("task: retrieval", "task: classification"))
        line = f"{run}: the run classifies, and ranks no galleries"
    elif case == "no class":
        config = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(re.sub("class_path: .*MarketFolders", "class_path: mine.Reader", config))
        line = f"{run / 'config.yaml'}: data: there is no class mine.Reader (no module named 'mine')"
    elif case == "one set":
        for name in SETS[1:]:
            (run / "features" / f"{name}.npz").unlink()
        words, line = ["--confusion"], "confusion: no model has features of two test sets"
    else:
        run, line = tmp_path / "none", "is not there: no such checkpoint or run directory"
    assert line in refuse(capsys, "report", run, *words)


def test_python_refuses_what_is_none(results, run):
    with pytest.raises(ConfigError, match="num: 0 is less than 1"):
        results.queries(num=0)
    with pytest.raises(ConfigError, match="queries: no name is given"):
        results.queries([])
    shutil.rmtree(run / "features")
    with pytest.raises(DataError, match="holds no features of test sets; write them by fedsim predict"):
        fedsim.load_run(run).queries()
