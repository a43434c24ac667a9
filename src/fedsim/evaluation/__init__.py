"""Retrieval features, ranking metrics, and the scoring of a federation's models."""

from fedsim.evaluation.labels import RetrievalLabels
from fedsim.evaluation.ranker import Ranker, rank_features
from fedsim.evaluation.ranking import QueryScores, Ranking, average_scores, positive_ranks, score_ranks

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
