"""Importance: rank the members of every axis once, on calibration data, before anything is trained.

``methods`` says by what each axis can be ranked; ``settings`` refuses what cannot be run. ``spots`` are the places that the
family's table names, ``activations`` listens there, and ``experts`` inside fused experts; ``sums`` is what they gather,
``collect`` makes scores of it, and ``weights`` those that need no data; ``finite`` refuses numbers that are none. ``stack``
controls which layers run, and ``depth`` ranks them so. ``measure`` scores a model in memory, ``layerwise`` one that does not
fit, with ``hidden`` states waiting between layers. ``run`` goes from a model folder to a folder of scores, ``files`` writes it,
``state`` lets a run go on after an interruption. ``curve`` and ``report`` say what a cut would keep, ``probe`` and
``probe_report`` what it costs.

Example:
    >>> score_parent("parent", "scores", "calibration.jsonl", samples=64, seq_len=512).kept["hidden"]
    {56: 0.93, 48: 0.81, 32: 0.59, 16: 0.34}
"""

from star_elastic.score.measure import Scores, score_model
from star_elastic.score.methods import ScoreOptions
from star_elastic.score.probe import ProbeOptions
from star_elastic.score.report import ScoreReport
from star_elastic.score.run import score_parent

__all__ = ["ProbeOptions", "ScoreOptions", "ScoreReport", "Scores", "score_model", "score_parent"]
