"""Reading of run directories, tables and figures of their scores, and comparison with published numbers.

``fedsim report`` is the command line of :func:`report`. From Python, a figure needs no command line::

    from pathlib import Path

    from fedsim.report import all_sets, draw_curves, group_runs, titles_of

    groups = group_runs([Path("runs/fedpav"), Path("runs/local")])
    draw_curves(groups, titles_of(all_sets(groups)), "mAP", Path("curves.pdf"))
"""

from fedsim.report.comparison import compare_with, find_table
from fedsim.report.costs import traffic
from fedsim.report.figure import draw_cmc, draw_curves, draw_participation, draw_scores, draw_tradeoff
from fedsim.report.groups import RunGroup, group_runs
from fedsim.report.layout import score_table
from fedsim.report.runs import Rule, Run, read_run
from fedsim.report.scores import all_sets, titles_of
from fedsim.report.table import report

__all__ = [
    "Rule",
    "Run",
    "RunGroup",
    "all_sets",
    "compare_with",
    "draw_cmc",
    "draw_curves",
    "draw_participation",
    "draw_scores",
    "draw_tradeoff",
    "find_table",
    "group_runs",
    "read_run",
    "report",
    "score_table",
    "titles_of",
    "traffic",
]
