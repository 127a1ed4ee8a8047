"""Importance: rank the members of every axis once, on calibration data, before anything is trained.

``activations`` listens at the places that the family's table names, ``experts`` lets it listen inside fused experts, ``run``
goes from a model folder to a folder of scores, ``report`` says what a cut would keep.

Example:
    >>> score_parent("parent", "scores", "calibration.jsonl", samples=64, seq_len=512).kept["hidden"]
    {48: 0.81, 32: 0.59}
"""

from star_elastic.score.report import ScoreReport
from star_elastic.score.run import Scores, score_model, score_parent

__all__ = ["ScoreReport", "Scores", "score_model", "score_parent"]
