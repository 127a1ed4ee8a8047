"""Search: which widths under a budget cost least, for those who want a smaller model and train no router.

``choose`` says which axes may be cut, ``grid`` lists the nested models that just fit a budget, ``walk`` in which order they are
tried, ``meter`` measures, ``cache`` keeps what was measured, ``run`` goes from a parent to an answer, ``report`` prints it.

Example:
    >>> search_parent("sorted", Budget("active_params", 2_000_000_000), "text.jsonl").best.submodel.widths
    {'hidden': 1920, 'expert_ffn': 960}
"""

from star_elastic.search.report import SearchReport, show_search
from star_elastic.search.run import search_parent

__all__ = ["SearchReport", "search_parent", "show_search"]
