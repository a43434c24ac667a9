"""Retrieval features, ranking metrics, and the scoring of a federation's models."""

from fedsim.evaluation.ranking import Ranking, positive_ranks, rank_features, score_ranks

__all__ = ["Ranking", "positive_ranks", "rank_features", "score_ranks"]
