"""Ranking and its scores, and the evaluation of a federation's models."""

from fedsim.evaluation.ranker import Ranker, rank_features
from fedsim.evaluation.ranking import QueryScores, Ranking, RetrievalLabels, average_scores, positive_ranks, score_ranks

__all__ = [
    "QueryScores",
    "Ranker",
    "Ranking",
    "RetrievalLabels",
    "average_scores",
    "positive_ranks",
    "rank_features",
    "score_ranks",
]
