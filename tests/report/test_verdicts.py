"""The one rule of verdict, against plain formulas; and the scores by seed that records have for it."""

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from claims import scores_by_seed
from verdicts import Claim, chance, holm, main, paired, read_figures, unpaired, verdicts


def draws(seed, n=6):
    rng = np.random.default_rng(seed)
    return [rng.normal(rng.normal(scale=4), 1 + rng.random(), 3).round(1).tolist() for _ in range(n)]


def interval(claim, level):
    """The interval of Student's t, by its quantile."""
    half = stats.t.ppf(0.5 + level / 2, claim.freedom) * claim.error
    return claim.mean - half, claim.mean + half


@pytest.mark.parametrize("seed", range(3))
def test_differences_by_seed_have_student_s_interval(seed):
    for gains in draws(seed):
        mean = sum(gains) / 3
        error = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / 2 / 3)
        assert paired(gains) == pytest.approx((mean, error, 2, 0))
        assert chance(paired(gains)) == pytest.approx(stats.ttest_1samp(gains, 0).pvalue)


def test_means_with_deviations_have_welch_s_interval():
    for ahead, behind in zip(draws(0), draws(1), strict=True):
        (a, b), (s, t) = ([np.mean(ahead), np.mean(behind)], [np.std(ahead, ddof=1), np.std(behind, ddof=1)])
        freedom = (s**2 / 3 + t**2 / 3) ** 2 / ((s**2 / 3) ** 2 / 2 + (t**2 / 3) ** 2 / 2)
        assert unpaired((a, s), (b, t)) == pytest.approx((a - b, math.sqrt(s**2 / 3 + t**2 / 3), freedom, 0))
        assert chance(unpaired((a, s), (b, t))) == pytest.approx(stats.ttest_ind(ahead, behind, equal_var=False).pvalue)


def test_holm_s_correction_takes_the_claims_one_after_another():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1, 1]
    unknown = holm([math.nan, 0.01, math.nan, 0.02])  # tests without a result are tests
    assert [unknown[1], unknown[3]] == pytest.approx([0.04, 0.06])
    assert [math.isnan(value) for value in unknown] == [True, False, True, False]
    assert holm([]) == []


@pytest.mark.parametrize("margin", [0, 3])
def test_a_verdict_is_that_of_the_interval(margin):
    """The claim with the k-th smallest p of m has the level 1 - 0.05 / (m - k), if all before it are shown."""
    seen = set()
    for seed in range(60):
        claims = [paired(gains)._replace(margin=margin) for gains in draws(seed)]
        order = sorted(range(len(claims)), key=lambda index: chance(claims[index]))
        expected, is_open = ["not shown"] * len(claims), True
        for rank, index in enumerate(order):
            low, high = interval(claims[index], 1 - 0.05 / (len(claims) - rank))
            is_open &= (-margin < low and high < margin) if margin else (low > 0 or high < 0)
            if is_open:
                expected[index] = "yes" if margin or low > 0 else "no, behind"
        assert verdicts(claims) == expected
        seen.update(expected)
    assert seen == {"yes", "not shown"} | (set() if margin else {"no, behind"})


def test_a_claim_without_any_spread_is_not_shown():
    claims = [paired([1.0, 1.0, 1.0]), paired([0.1, 0.1, 0.1]), unpaired((90.0, 0.0), (10.0, 0.0)), Claim(0, 0, 2, 3)]
    assert verdicts(claims) == ["not shown"] * 4


def test_a_claim_alone_can_be_shown_and_is_not_beside_others():
    clear, vague = Claim(10.0, 2.0, 2), Claim(0.1, 2.0, 2)
    assert verdicts([clear]) == ["yes"]
    assert verdicts([clear, vague]) == ["not shown", "not shown"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("60.2 ± 6.6 against 52.9 ± 7.5", [unpaired((60.2, 6.6), (52.9, 7.5))]),
        ("60.2 ± 6.6 against 52.9 ± 7.5, by seed +6.8, +11.1, +3.9", [paired([6.8, 11.1, 3.9])]),
        ("by seed 20, 28, 16 against 8, 10, 9", [paired([12, 18, 7])]),
        ("-0.1, +0.2, +2.5", [paired([-0.1, 0.2, 2.5])]),
        ("1.0 ± 0.1 against 2.0 ± 0.1; 34.3, own; -1.0, +2.0", [unpaired((1, 0.1), (2, 0.1)), paired([-1, 2])]),
        ("10 of 12 clients; 12 of 12", []),
        ("rank correlation -0.37 to -0.49", []),
    ],
)
def test_cells_are_read(text, expected):
    assert [*read_figures(text)] == [pytest.approx(claim) for claim in expected]


def test_the_script_prints_a_verdict_for_each_claim(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["verdicts.py", "by seed +16.4, +14.8, +15.0", "by seed +6.8, +11.1, +3.9"])
    main()
    assert re.findall(r"yes|no, behind|not shown", capsys.readouterr().out) == ["yes", "not shown"]


def test_records_of_claims_have_the_delivered_models_scores_by_seed(tmp_path):
    for name, scores in {
        "local0": {"global/seen": 0.1, "personalised/seen": 0.251, "personalised/unseen": 0.3},
        "local1": {"global/seen": 0.1, "personalised/seen": 0.262, "personalised/unseen": 0.4},
        "union": {"global/seen": 0.5},
    }.items():
        folder = tmp_path / "runs" / "000" / name
        folder.mkdir(parents=True)
        metrics = {f"test/{key}/mAP": score for key, score in scores.items()}
        (folder / "summary.json").write_text(json.dumps({"final": {"metrics": metrics}}))
    rows = [re.split(r"\s{2,}", line.strip()) for line in scores_by_seed(tmp_path).splitlines()[2:]]
    assert rows == [["local", "25.1, 26.2", "30.0, 40.0"], ["union", "50.0", "-"]]
