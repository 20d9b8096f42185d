"""Writes docs/guides/settings.md, every setting with its default and its meaning, from the classes of qknorm.config.

python docs/make_settings.py
"""

import ast
import inspect
import itertools
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import qknorm
from qknorm.config import Cleaning, Settings, Subwords

PAGE = Path(__file__).parent / "guides" / "settings.md"

OPENING = """\
# Every setting

A setting is an option of a command, as in `qknorm train data/gl-en --run runs/wide --model.feed-forward 4096`, or a
line of a TOML file, which `--config` puts over a preset:

```toml
[model]
feed_forward = 4096
norm = "layer"
[model.dropout]
attention = 0.2
```

Options go over the file, the file over the preset. `"none"` in a file leaves open what can be left open. A name or a
value that is not known is refused before anything runs. A run folder has all of its settings in settings.toml.

This page is made from the source: `python docs/make_settings.py`.
"""


def main() -> None:
    PAGE.write_text(make_page(), encoding="utf-8")


def make_page() -> str:
    translator, language_model = _rows(qknorm.preset("low-resource")), _rows(qknorm.preset("character-lm"))
    differing = {
        group: [row for row in rows if row not in translator.get(group, ())] for group, rows in language_model.items()
    }
    parts = [
        OPENING,
        "## `qknorm train` on a prepared folder\n\n"
        "The values of the preset `low-resource`, which is the default on a GPU.\n",
        *_tables(translator),
        "## `qknorm train` on a text file\n\nA language model has the settings above that make sense for it. The "
        "values of the preset `character-lm`, where\nthey or their meaning differ:\n",
        *_tables(differing),
        "## `qknorm prepare`\n",
        *_tables({**_rows(Subwords(), "subwords"), **_rows(Cleaning(), "cleaning")}),
    ]
    return "\n".join(parts)


def _tables(rows: dict[str, list[str]]) -> list[str]:
    groups = ((group, "\n".join(own)) for group, own in rows.items() if own)
    return [f"### {group}\n\n| setting | default | meaning |\n|---|---|---|\n{own}\n" for group, own in groups]


def _rows(values: Settings, group: str = "") -> dict[str, list[str]]:
    """By group, this one first and then those in it, a line of a table for each setting."""
    meanings, own, inner = _meanings(type(values)), [], {}
    for name, field in type(values).model_fields.items():
        value = getattr(values, name)
        if isinstance(value, Settings):
            inner |= _rows(value, f"{group}.{name}".lstrip("."))
        else:
            own.append(f"| `{name}` | {_show(value)} | {_choices(field.annotation)}{meanings[name]} |")
    return {group: own, **inner}


def _meanings(kind: type[Settings]) -> dict[str, str]:
    """The docstring under each field, of the class and of those it comes from, in one line."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if not issubclass(each, Settings) or each is Settings:
            continue
        body = ast.parse(inspect.getsource(each)).body[0].body  # type: ignore[attr-defined]
        for field, doc in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(doc.value)).split())
    return found


def _choices(annotation: Any) -> str:
    if get_origin(annotation) is not Literal:
        return ""
    return ", ".join(f"`{each}`" for each in get_args(annotation)) + ". "


def _show(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):
        return ", ".join(map(_show, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
