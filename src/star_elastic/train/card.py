"""The README.md of a trained family."""

from __future__ import annotations

from pathlib import Path

from star_elastic import cost
from star_elastic.card import front_matter, licence_text, read_licence, usage
from star_elastic.layout import Layout
from star_elastic.submodel import ElasticConfig
from star_elastic.train.report import TrainReport
from star_elastic.units import format_count
from star_elastic.version import VERSION


def family_card(report: TrainReport, layout: Layout, elastic: ElasticConfig, *, parent: Path) -> str:
    """The card of an elastic checkpoint: its submodels, how they were trained, how to use them, under which licence.

    Args:
        report: The run's numbers.
        layout: The parent's table.
        elastic: The submodels.
        parent: The parent's folder; its card names the licence.
    """
    title, licence = report.output.resolve().name, read_licence(parent)
    name = str(elastic.provenance.get("parent") or parent.resolve().name)
    lines = [
        front_matter(name, licence),
        f"# {title}\n",
        f"A family of nested models in one checkpoint, distilled from `{name}` by star-elastic {VERSION} in {report.steps:,} "
        f"steps ({report.tokens:,} tokens). The folder loads as its largest model; any other size is cut out without training:\n",
        "```bash",
        f"star-elastic slice {title} {title}-NAME --to NAME",
        "```\n",
        "| submodel | parameters | active per token | last distillation loss (nats per token) |",
        "|---|---|---|---|",
    ]
    for key, submodel in elastic.submodels.items():
        total = cost.params(layout, submodel.keyed_widths, submodel.layers)
        active = cost.active_params(layout, submodel.keyed_widths, submodel.layers)
        loss = report.submodels[key].kd_recent
        shown = "not trained" if loss is None else f"{loss:.4f}"
        lines.append(f"| {key} | {format_count(total)} ({total:,}) | {format_count(active)} ({active:,}) | {shown} |")
    return "\n".join([*lines, "", usage(title), licence_text(name, licence)])
