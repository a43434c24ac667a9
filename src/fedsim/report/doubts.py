"""Doubts about a run: what its files do not say, and what they say against each other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import isclose, isnan
from typing import Any

from fedsim.core.metrics import MEANS
from fedsim.core.metrics_rows import Row, RowsDigest
from fedsim.core.names import metric_name, metric_parts
from fedsim.core.replaced_run import TESTS
from fedsim.report.run_files import end_of
from fedsim.settings.changes import Change, fingerprint_after
from fedsim.settings.configuration import compare, fingerprint_from, flat, missing_settings, names_file
from fedsim.settings.effects import Flat
from fedsim.settings.identity import digest_of_config
from fedsim.settings.table import digest_of_table

_UNEQUAL = "has the {} {} in summary.json and {} in config.yaml"
_OF_ROUNDING = 0.01
"""largest difference between two scores of one model by other sizes of batches, or another number of threads"""


def doubts_about(
    summary: Mapping[str, Any], config: Mapping[str, Any], settings: Flat, changes: list[Change], has_log: bool
) -> Iterator[str]:
    """Yield the reasons beside contradictions for which nothing can be certified of a run.

    Each continues a sentence about the run.
    """
    reason = summary.get("identity", {}).get("unwritable")
    if not config or reason:
        yield ("has an incomplete config.yaml" if config else "has no config.yaml") + (f" ({reason})" if reason else "")
        return
    if gone := missing_settings(settings):
        yield f"has a config.yaml without {', '.join(gone[:5])}" + (f" and {len(gone) - 5} more" if gone[5:] else "")
    if "config" not in summary.get("identity", {}):  # nor had early versions
        yield "has no record of the config.yaml that it began with"
    fingerprint = fingerprint_after(fingerprint_from(settings), changes)  # of a script, it may be of the folder
    is_of_these_facts = summary.get("identity", {}).get("table") == digest_of_table()
    if is_of_these_facts and summary["fingerprint"] != fingerprint:
        yield _UNEQUAL.format("fingerprint", summary["fingerprint"], fingerprint)
    if changes:
        yield f"was continued with other settings ({'; '.join(map(str, changes))})"
    if not has_log:
        yield "has no metrics.csv"
    if not summary["finished"]:
        yield f"is not finished, it has {summary['rounds']} rounds"
    elif end := end_of(summary, settings):
        yield f"ended {end}"


def contradictions_of(summary: Mapping[str, Any], config: Mapping[str, Any], settings: Flat) -> Iterator[str]:
    """Yield the differences between the summary of a run and its config; each continues a sentence about it."""
    present = digest_of_config(config)
    if summary.get("identity", {}).get("config", present) != present:
        yield "has another config.yaml than the one that it began with"
        return
    yield from _doubts_about_settings(summary, settings)
    yield from _doubts_about_identity(summary, config, settings)
    yield from _doubts_about_data(summary, settings)


def _doubts_about_settings(summary: Mapping[str, Any], settings: Flat) -> Iterator[str]:
    """Yield differences between the settings of a run and those that its results show."""
    pairs, planned = [], settings["trainer.max_epochs"].value
    for name, option in (("method", "model.method"), ("seed", "seed_everything")):
        if option in settings and settings[option].is_given:
            value = settings[option].value
            pairs.append((name, summary[name], value.rpartition(".")[2] if isinstance(value, str) else value))
    if isinstance(planned, int) and 0 <= planned < summary["rounds"]:
        pairs.append(("rounds", summary["rounds"], planned))
    yield from (_UNEQUAL.format(name, old, new) for name, old, new in pairs if old != new)


def _doubts_about_identity(summary: Mapping[str, Any], config: Mapping[str, Any], settings: Flat) -> Iterator[str]:
    """Yield the files and the code in the identity of a run that its config does not name."""
    identity, named = summary.get("identity", {}), json.dumps(config, default=str, ensure_ascii=False)
    for option in identity.get("files", {}):
        if option not in settings or not names_file(settings[option]):
            yield f"has the content of {option} in summary.json, which names no file in config.yaml"
    for module in identity.get("code", {}):
        if f'"{module}.' not in named:
            yield f"has the code of {module} in summary.json, which config.yaml does not name"


def _doubts_about_data(summary: Mapping[str, Any], settings: Flat) -> Iterator[str]:
    """Yield differences between the clients and test sets that settings and data give, and those of the results."""
    if (summary.get("data") or {}).get("generated") and settings["data.generated"].value is None:
        yield "has generated images in summary.json and none in config.yaml"
    sets, public = (summary.get("data") or {}).get("sets"), str(settings["data.public"].value)
    unseen, parts = settings["data.unseen"].value, settings["data.parts"].value
    is_known = isinstance(unseen, list) and isinstance(parts, int) and settings["data.manifest"].value is None
    if sets is None or not is_known:
        return
    seen = {
        name: counts["train"] for name, counts in sets.items() if counts.get("train") and name not in (*unseen, public)
    }
    by_camera, expected = settings["data.partition"].value == "by_camera", _clients(seen, settings)
    clients = [client.rstrip("0123456789") if by_camera else client for client in summary["clients"]]
    is_counted = not clients and summary.get("num_clients") == len(expected)  # of very many, as none is listed
    if not is_counted and sorted(clients) != sorted(expected):
        yield f"has other clients in summary.json than its settings and data give: {', '.join(summary['clients'])}"
    if {name for name in sets if name not in seen} - {public} != {*summary["unseen"]} - {public}:
        names = ", ".join(summary["unseen"]) or "none"
        yield f"has other unseen data sets in summary.json than its settings and data give: {names}"


def _clients(seen: Mapping[str, Any], settings: Flat) -> list[str]:
    """Return the names of clients, of cameras without their numbers; ``seen``: data set -> counts of its training."""
    partition = settings["data.partition"].value
    parts = [f"part{number + 1}" for number in range(settings["data.parts"].value)]
    if partition in ("by_dataset", "union", "stratified"):
        return {"by_dataset": [*seen], "union": ["union"], "stratified": parts}[partition]
    if partition == "by_camera":
        return [f"{name}-cam" for name, counts in seen.items() for _ in range(counts["cameras"])]
    return [f"{name}-{part}" for name in seen for part in parts]


def doubts_about_log(
    summary: Mapping[str, Any], files: Sequence[Sequence[Row]], log: Mapping[int, Mapping[str, float]]
) -> Iterator[str]:
    """Yield differences between a run and its log: rows by file, and numbers by round."""
    yield from _doubts_about_rows(summary, files)
    yield from _doubts_about_results(summary, log)


def _doubts_about_rows(summary: Mapping[str, Any], files: Sequence[Sequence[Row]]) -> Iterator[str]:
    """Yield that the rows of a run's metrics files are not those that it has logged.

    A run that was killed may have logged a row more than its summary counts, and a callback at the end of a run rows
    of the last round without scores. A run of an earlier version has no record of its rows. That no round is missing,
    and that none stands twice in one file, can be seen all the same.
    """
    rows = [row for file_rows in files for row in file_rows]
    if record := summary.get("logged"):
        later = rows[record["rows"] :] if summary["finished"] else []
        has_scores = any(row[name] and _is_score(name) for row in later for name in row)
        if len(rows) < record["rows"] or has_scores or any(int(row["epoch"]) + 1 < summary["rounds"] for row in later):
            yield f"has {len(rows)} rows in metrics.csv and logged {record['rows']}"
        elif RowsDigest(rows[: record["rows"]]).record() != record:
            yield "has another metrics.csv than the one that it wrote"
        return
    rounds = sorted({int(row["epoch"]) + 1 for row in rows})
    if gone := sorted({*range(rounds[0], rounds[-1])} - {*rounds}) if rounds else []:
        yield f"lacks round {gone[0]} in metrics.csv"
    for file_rows in files:
        epochs = [int(row["epoch"]) for row in file_rows]
        cells = Counter((int(row["epoch"]), name) for row in file_rows for name in row if row[name] and _is_score(name))
        again = [later for epoch, later in pairwise(epochs) if later < epoch]
        again += [epoch for (epoch, _), count in cells.items() if count > 1]
        if again:
            yield f"has round {min(again) + 1} twice in metrics.csv"


def _doubts_about_results(summary: Mapping[str, Any], log: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
    """Yield differences between the results of a run and those that its log gives: round -> numbers.

    A log begins after round 1 if the run went on in another folder; then the results may be of earlier rounds.
    """
    rounds, last = summary["rounds"], max(log, default=0)
    if last != rounds and (summary["finished"] or last != rounds + 1):  # a kill may fall between log and summary
        yield f"has {rounds} rounds in summary.json and {last} in metrics.csv"
    log = {round_: row for round_, row in log.items() if round_ <= rounds}
    scored = {round_: row for round_, row in log.items() if any(map(_is_score, row))}
    final, best = ((summary[name] or {"round": 0, "metrics": {}}) for name in ("final", "best"))
    for name, evaluation in (("final", final), ("best", best)):
        round_, scores = evaluation["round"], evaluation["metrics"]
        if round_ >= min(log, default=1) and not _are_logged(scores, scored.get(round_, {})):
            yield f"has other {name} scores in summary.json than in metrics.csv"
    if scored and final["round"] != max(scored):
        of_round = f"round {final['round']}" if final["round"] else "no round"
        yield f"has the scores of {of_round} as its last, and of {max(scored)} in metrics.csv"
    for key in ("val/mAP", "val/top1"):
        if any(row.get(key, -1) > best["metrics"].get(key, -1) + 1e-6 for row in log.values()):
            yield f"has better {key} in metrics.csv than that of its best round in summary.json"
    for name, score in final["metrics"].items():
        split, _, metric = name.replace("oracle/", "test/").partition("/")
        delivered = metric_name(split, summary["primary"], "seen", metric)
        if not _is_close((score, final["metrics"].get(delivered, score))):
            yield f"has other {name} in summary.json than its {summary['primary']} models"
            return


def doubts_about_test(
    summary: Mapping[str, Any], settings: Flat, tested: Mapping[str, Any], log: Mapping[int, Mapping[str, float]]
) -> Iterator[str]:
    """Yield that ``fedsim test`` has other scores than the fit for the same round, scored alike.

    ``log``: round -> numbers; the last evaluation is in the summary, too, also of a run without a log.
    """
    if not tested["is_whole"]:
        yield f"has a {TESTS}/{tested['kind']}.json that was edited"
    final, round_ = summary["final"] or {"round": None, "metrics": {}}, tested.get("round")
    fitted = final["metrics"] if round_ == final["round"] else log.get(round_, {}) if round_ else {}
    if not tested.get("settings"):
        return
    effects = {difference.effect for difference in compare(settings, flat(tested["settings"]))}
    tolerance = _OF_ROUNDING if "rounding" in effects else 1e-6
    shared = [name for name in fitted if name.startswith("test/") and name in tested["metrics"]]
    for name in shared if "results" not in effects else ():
        if not _is_close(pair := (fitted[name], tested["metrics"][name]), tolerance):
            yield f"has {name} {pair[0]:.4f} in round {round_}, and {pair[1]:.4f} by fedsim test"
            return


def _is_score(name: str) -> bool:
    return name.removeprefix("attack/").startswith(("val/", "test/", "oracle/"))


def _are_logged(scores: Mapping[str, float], row: Mapping[str, float]) -> bool:
    """Return whether scores are those of a row of the log, which has 32 bits, and of very many sets the means alone."""
    logged = {name: score for name, score in row.items() if _is_score(name)}
    has_sets = any(name.count("/") > 2 and metric_parts(name)[2] not in MEANS for name in logged)
    names = {*logged, *scores} if has_sets or not logged else {*logged}
    return all(name in scores and name in logged and _is_close((scores[name], logged[name])) for name in names)


def _is_close(pair: tuple[float, float], tolerance: float = 1e-6) -> bool:
    return isclose(*pair, rel_tol=1e-6, abs_tol=tolerance) or all(map(isnan, pair))
