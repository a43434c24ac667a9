"""``fedsim report``: runs as tables, by a rule; how fast and how fair they are; beside published numbers."""

from fedsim.report.comparison import compare_with, find_table
from fedsim.report.groups import RunGroup, group_runs, traffic
from fedsim.report.layout import score_table
from fedsim.report.rules import Rule
from fedsim.report.runs import Run, read_run
from fedsim.report.table import report

__all__ = [
    "Rule",
    "Run",
    "RunGroup",
    "compare_with",
    "find_table",
    "group_runs",
    "read_run",
    "report",
    "score_table",
    "traffic",
]
