"""The README.md of a folder that we write: where it comes from, how large it is, how to run it, under which licence."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from star_elastic import cost
from star_elastic.engines import engine_commands
from star_elastic.layout import Layout
from star_elastic.parentage import Parentage
from star_elastic.per_layer import LayerWidths, by_width, span
from star_elastic.submodel import FULL, Submodel
from star_elastic.units import format_bytes, format_count
from star_elastic.version import VERSION

RECORD = "star_elastic"
"""The front-matter field that says, for programs, what a slice is: name, widths, kept layers, parameters."""

FRONT_MATTER_LICENCE = ("license", "license_name", "license_link", "language")


def slice_card(
    layout: Layout,
    submodel: Submodel,
    *,
    title: str,
    parent: Parentage,
    config: Mapping[str, Any],
    nbytes: int,
    licence: Mapping[str, Any],
    named: str | None,
    dropped: Sequence[str] = (),
    quantized: str = "",
) -> str:
    """The card of a slice.

    Args:
        layout: the parent's table.
        submodel: what was kept of it, in its full spelling.
        title: name of the slice, for the heading.
        parent: what is known of the parent.
        config: content of the slice's config.json.
        nbytes: bytes of the slice's weights.
        licence: front-matter fields taken over from the parent's card.
        named: the submodel's name in the parent's family, where it has one.
        dropped: names of the parent's tensors that were left out on request.
        quantized: how the weights are quantized, where they are.
    """
    widths = submodel.keyed_widths
    total = cost.params(layout, widths, submodel.layers)
    active = cost.active_params(layout, widths, submodel.layers)
    which = f"nested model `{named}`" if named and named != FULL else "nested model"
    record = {
        "version": VERSION,
        "name": named,
        "widths": submodel.widths,
        **({"layer_widths": submodel.layer_widths} if submodel.layer_widths else {}),
        "layers": list(submodel.layers) if submodel.layers is not None else None,
        "params": total,
        "active_params": active,
    }
    lines = [
        front_matter(parent.name, licence, record),
        f"# {title}\n",
        f"A {which} of `{parent.name}`, {_how(parent, named)} by star-elastic {VERSION}.\n",
        *_shapes_lines(parent),
        "| | this model | parent |",
        "|---|---|---|",
        f"| parameters | {format_count(total)} ({total:,}) | {_count(cost.params(layout, {}))} |",
        f"| active per token | {format_count(active)} ({active:,}) | {_count(cost.active_params(layout, {}))} |",
        *_width_lines(layout, submodel),
        f"\nThe weights take {format_bytes(nbytes)} ({nbytes:,} bytes).\n",
        *_dropped_lines(dropped),
        *_slice_usage(config, title, submodel.layer_widths, quantized),
        licence_text(parent.name, licence),
    ]
    return "\n".join(lines)


def sorted_card(
    *, title: str, parent: str, axes: tuple[str, ...], licence: Mapping[str, Any], quantized: str = ""
) -> str:
    """The card of a sorted parent."""
    lines = [
        front_matter(parent, licence),
        f"# {title}\n",
        f"`{parent}` with its weights put in order of importance by star-elastic {VERSION}: the same function, nested.",
        f"Sorted: {', '.join(axes) or 'nothing'}. Its nested models are listed in `elastic.json`.\n",
        quantized_usage(title, quantized) if quantized else usage(title),
        licence_text(parent, licence),
    ]
    return "\n".join(lines)


def front_matter(parent: str, licence: Mapping[str, Any], record: Mapping[str, Any] | None = None) -> str:
    """The block between ``---`` that model hubs read; ``record`` says what a slice is (see ``RECORD``)."""
    fields = {**licence, "library_name": "transformers", "pipeline_tag": "text-generation", "base_model": parent}
    return front_matter_text(fields | ({RECORD: dict(record)} if record else {}))


def front_matter_text(fields: Mapping[str, Any]) -> str:
    """Front matter of these fields."""
    return f"---\n{yaml.safe_dump(dict(fields), sort_keys=False, allow_unicode=True)}---\n"


def _slice_usage(
    config: Mapping[str, Any], title: str, layer_widths: LayerWidths, quantized: str
) -> tuple[str, ...]:
    """How to run a slice in transformers and in other engines."""
    if layer_widths:
        return (per_layer_usage(title, layer_widths, quantized),)
    commands = engine_commands(config, title, quantized=bool(quantized))
    return (quantized_usage(title, quantized) if quantized else usage(title), engines_text(commands))


def usage(title: str) -> str:
    """How to run the folder with transformers."""
    return f"""## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({_quoted(title)}, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained({_quoted(title)})
inputs = tokenizer("Hello", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```
"""


def per_layer_usage(title: str, layer_widths: LayerWidths, quantized: str = "") -> str:
    """How to run a folder whose layers differ in width, and how they differ by the parent's layers."""
    loads = (
        f"loads it. Its weights are quantized ({quantized}), and dequantized while it loads"
        if quantized
        else "loads it"
    )
    axes = "\n".join(f"- {axis}: {by_width(own)}" for axis, own in layer_widths.items())
    return f"""## Use

The layers of this model differ in width, which no transformers config can say: transformers refuses the folder, and star-elastic
{loads}.

```python
from star_elastic import ElasticModel
from transformers import AutoTokenizer

model = ElasticModel.from_pretrained({_quoted(title)})
tokenizer = AutoTokenizer.from_pretrained({_quoted(title)})
inputs = tokenizer("Hello", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```

Widths by the parent's layers (`elastic.json` has them by this model's):

{axes}
"""


def quantized_usage(title: str, quantized: str) -> str:
    """How to run a quantized folder, which transformers cannot."""
    return f"""## Use

Quantized ({quantized}). transformers cannot load this layout; vLLM, SGLang and TensorRT-LLM can. To take it as ordinary
numbers, dequantized while it loads:

```python
from star_elastic import ElasticModel

model = ElasticModel.from_pretrained({_quoted(title)}).model
```
"""


def _quoted(title: str) -> str:
    """A string of Python: a folder's name may hold quotes itself."""
    return json.dumps(title, ensure_ascii=False)


def engines_text(commands: Mapping[str, Sequence[str]]) -> str:
    """How to run the folder in other engines; empty where none can."""
    if not commands:
        return ""
    lines = [line for name, given in commands.items() for line in (f"# {name}", *given)]
    return "\n".join(["## Other engines\n", "```bash", *lines, "```\n"])


def licence_text(parent: str, licence: Mapping[str, Any]) -> str:
    """Where the licence comes from."""
    name = licence.get("license_name") or licence.get("license")
    said = f"`{name}`, inherited from" if name else "That of"
    return f"## License\n\n{said} `{parent}`; its licence and notice files, where it has any, are copied into this folder.\n"


def read_licence(folder: Path) -> dict[str, Any]:
    """Licence and language fields of a model card; empty where there is no card, or none that can be read."""
    fields = read_front_matter(folder)
    return {name: fields[name] for name in FRONT_MATTER_LICENCE if name in fields}


def read_front_matter(folder: Path) -> dict[str, Any]:
    """All fields of a model card's front matter; empty where there is no card, or none that can be read."""
    try:
        return split_card((folder / "README.md").read_text(encoding="utf-8"))[0]
    except (OSError, UnicodeDecodeError):
        return {}


def split_card(text: str) -> tuple[dict[str, Any], str]:
    """Front matter and body of a model card; no fields where it has no front matter that can be read."""
    if not text.startswith("---\n"):
        return {}, text
    block, _, body = text.removeprefix("---\n").partition("\n---")
    try:
        fields = yaml.safe_load(block)
    except yaml.YAMLError:
        return {}, text
    return (fields, body.removeprefix("\n")) if isinstance(fields, dict) else ({}, text)


def retitled(body: str, title: str) -> str:
    """A card's body whose commands take the model ``title`` from the hub, in place of the folder that the heading names."""
    found = re.search(r"^# (.+)$", body, re.MULTILINE)
    if found is None:
        return body
    folder = found[1].strip()
    names = "|".join(re.escape(name) for name in (folder, _quoted(folder)[1:-1]))
    old = re.compile(rf"(?<![\w./-])({names})(?![\w./-])")

    def command(line: str) -> str:
        if line.startswith("star-elastic export "):  # takes folders only
            return f"hf download {title} --local-dir {shlex.quote(folder)}\n{line}"
        return old.sub(title, line)

    blocks = re.split(r"(^```.*?^```$)", body, flags=re.MULTILINE | re.DOTALL)
    return "".join("\n".join(map(command, block.split("\n"))) if block.startswith("```") else block for block in blocks)


def reparented(body: str, old: str, new: str) -> str:
    """A card's body that names the parent ``new`` where it named it ``old``; a nested model of that name keeps it."""
    return re.sub(rf"(?<!nested model )`{re.escape(old)}`", lambda _: f"`{new}`", body)


def _how(parent: Parentage, named: str | None) -> str:
    """How a nested model came to be, as far as that is known."""
    if parent.trained and named:
        return "trained together with its family, then cut out of it"
    return "cut out of it" if parent.shapes_of and named else "cut out of its weights untrained"


def _shapes_lines(parent: Parentage) -> list[str]:
    """What it means that a parent was recognised by nothing but its shapes."""
    preset = parent.shapes_of
    if preset is None:
        return []
    published = f" (`{preset.hub_name()}`)" if preset.hub_name() else ""
    return [
        f"The parent was recognised by the shapes that its config.json describes: those of {preset.name}{published}, which was "
        f"trained for its sizes {', '.join(preset.sizes)}. Its weights were not compared; others of the same shapes were not "
        "trained so.\n"
    ]


def _dropped_lines(dropped: Sequence[str]) -> list[str]:
    if not dropped:
        return []
    names = ", ".join(f"`{name}`" for name in dropped)
    return [f"Left out of the parent on request, {len(dropped)} in all: {names}.\n"]


def _width_lines(layout: Layout, submodel: Submodel) -> list[str]:
    widths: dict[str, Any] = dict(layout.complete(submodel.widths))
    widths |= {axis: span(own) for axis, own in submodel.layer_widths.items()}
    lines = [f"| {name} | {widths[name]} | {axis.size} |" for name, axis in layout.width_axes.items()]
    kept = len(submodel.layers) if submodel.layers is not None else layout.num_layers
    return [*lines, f"| layers | {kept} | {layout.num_layers} |"]


def _count(value: int) -> str:
    return f"{format_count(value)} ({value:,})"
