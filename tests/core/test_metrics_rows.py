"""The rows of metrics.csv after resumes, against a plain model of what a run has logged."""

import csv
import random

import pytest

from fedsim.core.errors import DataError
from fedsim.core.metrics_rows import METRICS_FILE, metrics_files, rows_before, write_rows


def write(path, rows):
    names = sorted({name for row in rows for name in row})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def test_parts_of_earlier_versions_drawn_at_random_become_one_file(tmp_path):
    """Each start repeats rounds of the one before, from its checkpoint on; the last one to log a round counts."""
    for number in range(100):
        rng, folder = random.Random(number), tmp_path / str(number)
        folder.mkdir()
        done, logged = 0, {}
        for start in range(num_starts := rng.randint(1, 4)):
            first, rows = rng.randint(0, done), []
            done = first + rng.randint(1, 4)
            logged = {epoch: values for epoch, values in logged.items() if epoch < first}
            for epoch in range(first, done):
                logged[epoch] = [{"epoch": str(epoch), "loss": str(rng.random())}]
                if rng.random() < 0.5:
                    logged[epoch].append({"epoch": str(epoch), "val/mAP": str(rng.random())})
                rows += logged[epoch]
            write(folder / (METRICS_FILE if start == num_starts - 1 else f"metrics-{start + 1}.csv"), rows)
        rounds = rng.randint(0, done + 1)
        kept = rows_before(folder, rounds)
        expected = [row for epoch in sorted(logged) if epoch < rounds for row in logged[epoch]]
        assert [{name: value for name, value in row.items() if value} for row in kept] == expected
        names = write_rows(folder / "new.csv", kept)
        assert names == sorted({name for row in kept for name in row})
        with (folder / "new.csv").open(newline="") as file:
            assert [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)] == expected


def test_only_the_files_of_a_run_are_its_parts(tmp_path):
    for name in ("metrics-2.csv", "metrics-old.csv", "metrics-0.csv", "metrics-10.csv", "metrics.csv", "metrics-1.csv"):
        (tmp_path / name).touch()
    names = [path.name for path in metrics_files(tmp_path)]
    assert names == ["metrics-1.csv", "metrics-2.csv", "metrics-10.csv", "metrics.csv"]


def test_a_file_that_is_no_log_is_refused(tmp_path):
    (tmp_path / METRICS_FILE).write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"metrics.csv: is not a log of fedsim fit"):
        rows_before(tmp_path, 3)
