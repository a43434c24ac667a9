"""``fedsim report``: runs as tables, by a rule; how fast and how fair they are; beside published numbers."""

from fedsim.report.comparison import compare_with, find_table
from fedsim.report.rules import Rule
from fedsim.report.runs import Group, Run, group_runs, read_run
from fedsim.report.scores import score_table
from fedsim.report.table import report
from fedsim.report.traffic import traffic

__all__ = [
    "Group",
    "Rule",
    "Run",
    "compare_with",
    "find_table",
    "group_runs",
    "read_run",
    "report",
    "score_table",
    "traffic",
]
