"""What a notebook cell returns and what the handover prints: text, tables, figures, gates, and sections of them.

Each item renders itself as HTML, Markdown and plain text; everything that comes from outside (model names, config values, tokenizer strings) is escaped
in all three. The classes are pydantic models, because a record stores them and the handover is rendered from the record alone.
"""

import base64
import html
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

_MARKDOWN_SPECIAL = re.compile(r"[\\`*_\[\]<>#|~$&@]|://|www\.|^[+\-=](?=\s|$)|^\d+[.)](?=\s)")
_MARKDOWN_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;", "@": "&#64;", "://": "&#58;//", "www.": "www&#46;", "|": "\\|"}
_NUMBER = re.compile(r"[+-]?[\d,]*\.?\d+(e[+-]?\d+)?( ?%)?|nan|-?inf")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def _scalar(value: Any) -> Any:
    """JSON has no NaN and no infinity, and numpy scalars are not JSON: keep what a reader needs."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


Scalar = Annotated[bool | int | float | str | None, BeforeValidator(_scalar)]


def number(value: Any) -> str:
    """A value as people read it: 1.2e-14, 49,152, yes, 0.125; text unchanged."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e12:
            return f"{int(value):,}"
        if value == 0 or 1e-3 <= abs(value) < 1e5:
            return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"
        return re.sub(r"\.?0*e([+-])0*(\d)", r"e\1\2", f"{value:.2e}").replace("e+", "e")
    return str(value)


def when(stamp: str | None) -> str:
    """An ISO time stamp as people read it: 2026-11-29 21:16 UTC."""
    return stamp[:16].replace("T", " ") + (" UTC" if stamp.endswith("+00:00") else "") if stamp else "–"


def visible(text: Any) -> str:
    """Text with control and direction characters made visible, so that nothing hidden reaches a page."""
    return _CONTROL.sub(lambda m: f"\\x{ord(m.group()):02x}" if ord(m.group()) < 256 else f"\\u{ord(m.group()):04x}", str(text))


def escape_html(text: Any) -> str:
    return html.escape(visible(text).replace("\n", "⏎"), quote=True)


def escape_markdown(text: Any) -> str:
    """One line of Markdown that shows `text` as it is: no emphasis, link, HTML, table cell or heading can come out of it."""
    line = visible(text).replace("\r", "").replace("\n", "⏎")
    return _MARKDOWN_SPECIAL.sub(lambda m: _MARKDOWN_ENTITIES.get(m.group(), m.group()[:-1] + "\\" + m.group()[-1]), line.strip())


def code_markdown(text: Any) -> str:
    """Inline code that survives backticks and table pipes."""
    line = visible(text).replace("\n", "⏎")
    if not line:
        return ""
    if "|" in line or "<" in line:
        return f"<code>{html.escape(line).replace('|', '&#124;').replace('`', '&#96;').replace('*', '&#42;').replace('_', '&#95;')}</code>"
    fence = "`" * (max((len(run) for run in re.findall(r"`+", line)), default=0) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


class Shown(BaseModel):
    """Something a cell can return."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    def html(self) -> str:
        raise NotImplementedError

    def markdown(self) -> str:
        raise NotImplementedError

    def plain(self) -> str:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return f'<div class="labkit">{self.html()}</div>'

    def _repr_markdown_(self) -> str:
        return self.markdown()

    def __repr__(self) -> str:
        return self.plain()

    __str__ = __repr__


class Text(Shown):
    """A paragraph of the lab's own words; `values` are outside strings, put in escaped where the words say {name}."""

    type: Literal["text"] = "text"
    words: str
    values: dict[str, Scalar] = Field(default_factory=dict)

    def _fill(self, show) -> str:
        return re.sub(r"\{(\w+)\}", lambda m: show(number(self.values[m.group(1)])) if m.group(1) in self.values else m.group(), self.words)

    def html(self) -> str:
        words = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(self.words, quote=False))
        return "<p>" + Text(words=words, values=self.values)._fill(lambda v: f"<code>{escape_html(v)}</code>") + "</p>"

    def markdown(self) -> str:
        return self._fill(code_markdown)

    def plain(self) -> str:
        return self._fill(visible)


class Table(Shown):
    """Rows under column names. Numbers are right-aligned; `code` names the columns whose text is a name, shown in code type; `fold` hides a long table."""

    type: Literal["table"] = "table"
    title: str
    columns: list[str]
    rows: list[list[Scalar]]
    note: str = ""
    code: list[str] = Field(default_factory=list)
    fold: bool = False

    @property
    def _numeric(self) -> list[bool]:
        """Columns to align right: numbers, and text that reads as one."""
        shown = [[str(row[i]) for row in self.rows if row[i] not in (None, "") and not isinstance(row[i], bool)] for i in range(len(self.columns))]
        return [bool(column) and all(_NUMBER.fullmatch(text) for text in column) for column in shown]

    def html(self) -> str:
        numeric, code = self._numeric, [c in self.code for c in self.columns]
        cell = lambda value, i: f"<code>{escape_html(number(value))}</code>" if code[i] and value not in (None, "") else escape_html(number(value))
        align = lambda i: ' class="n"' if numeric[i] else ""
        head = "".join(f"<th{align(i)}>{escape_html(c)}</th>" for i, c in enumerate(self.columns))
        body = "".join("<tr>" + "".join(f"<td{align(i)}>{cell(v, i)}</td>" for i, v in enumerate(row)) + "</tr>" for row in self.rows)
        table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        note = f'<p class="note">{escape_html(self.note)}</p>' if self.note else ""
        title = escape_html(self.title)
        if self.fold:
            return f"<details><summary>{title} <span>({len(self.rows)} rows)</span></summary>{table}{note}</details>"
        return f"<h4>{title}</h4>{table}{note}"

    def markdown(self) -> str:
        numeric, code = self._numeric, [c in self.code for c in self.columns]
        cell = lambda value, i: code_markdown(number(value)) if code[i] and value not in (None, "") else escape_markdown(number(value))
        lines = [
            "| " + " | ".join(map(escape_markdown, self.columns)) + " |",
            "|" + "|".join("---:" if n else "---" for n in numeric) + "|",
            *("| " + " | ".join(cell(v, i) for i, v in enumerate(row)) + " |" for row in self.rows),
        ]
        body = "\n".join(lines) + (f"\n\n{escape_markdown(self.note)}" if self.note else "")
        if self.fold:
            return f"<details><summary>{escape_html(self.title)} ({len(self.rows)} rows)</summary>\n\n{body}\n\n</details>"
        return f"**{escape_markdown(self.title)}**\n\n{body}"

    def plain(self) -> str:
        cells = [[visible(number(v)).replace("\n", "⏎") for v in row] for row in [self.columns, *self.rows]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        numeric = self._numeric
        lines = ["  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric)).rstrip() for row in cells]
        return "\n".join([visible(self.title), lines[0], "  ".join("-" * w for w in widths), *lines[1:], *([self.note] if self.note else [])])


class Figure(Shown):
    """A picture of the record: `file` is relative to the folder of the model's records; `alt` says what it shows to who cannot see it."""

    type: Literal["figure"] = "figure"
    title: str
    file: str
    alt: str
    caption: str = ""
    _base: Path | None = PrivateAttr(default=None)
    _link: str = PrivateAttr(default="")

    def at(self, base: Path, link: str = "") -> "Figure":
        """Where the file lies on this machine, and the folder that a Markdown page puts before its name."""
        self._base, self._link = Path(base), link
        return self

    def html(self) -> str:
        path = (self._base or Path()) / self.file
        if not path.is_file():
            return f'<p class="note">{escape_html(self.title)}: the figure {escape_html(self.file)} is not here.</p>'
        kind = "image/svg+xml" if path.suffix == ".svg" else "image/png"
        data = base64.b64encode(path.read_bytes()).decode()
        caption = escape_html(self.title) + (f" <span>{escape_html(self.caption)}</span>" if self.caption else "")
        return f'<figure><img alt="{escape_html(self.alt)}" src="data:{kind};base64,{data}"><figcaption>{caption}</figcaption></figure>'

    def markdown(self) -> str:
        caption = f"\n\n*{escape_markdown(self.title)}.* {escape_markdown(self.caption)}".rstrip()
        return f"![{escape_markdown(self.alt)}]({self._link}{self.file}){caption}"

    def plain(self) -> str:
        return f"[figure] {visible(self.title)}: {self.file}"


class Gate(Shown):
    """A check that a phase must pass. `limit` is what `value` is held to; `explanation` says what the gate means to its reader."""

    type: Literal["gate"] = "gate"
    name: str
    passed: bool
    value: Scalar = None
    limit: Scalar = None
    explanation: str = ""

    def html(self) -> str:
        return Gates(gates=[self]).html()

    def markdown(self) -> str:
        return Gates(gates=[self]).markdown()

    def plain(self) -> str:
        limit = "" if self.limit is None else f" (limit {number(self.limit)})"
        return f"{'pass' if self.passed else 'FAIL'}  {visible(self.name)}: {visible(number(self.value))}{limit}"


class Gates(Shown):
    """The gates of a phase as a table with a mark per row."""

    type: Literal["gates"] = "gates"
    gates: list[Gate]

    def html(self) -> str:
        rows = "".join(
            f'<tr class="{"pass" if g.passed else "fail"}"><td><b class="mark">{"✓ pass" if g.passed else "✗ fail"}</b></td><td>{escape_html(g.name)}</td>'
            f'<td class="n">{escape_html(number(g.value))}</td><td class="n">{escape_html(number(g.limit))}</td><td>{escape_html(g.explanation)}</td></tr>'
            for g in self.gates
        )
        head = '<tr><th></th><th>gate</th><th class="n">value</th><th class="n">limit</th><th>what it says</th></tr>'
        return f'<div class="scroll"><table class="gates"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'

    def markdown(self) -> str:
        rows = [
            f"| {'✓' if g.passed else '✗ **fail**'} | {escape_markdown(g.name)} | {escape_markdown(number(g.value))} | {escape_markdown(number(g.limit))} "
            f"| {escape_markdown(g.explanation)} |"
            for g in self.gates
        ]
        return "\n".join(["| | gate | value | limit | what it says |", "|---|---|---:|---:|---|", *rows])

    def plain(self) -> str:
        return "\n".join(g.plain() for g in self.gates)


Item = Annotated[Text | Table | Figure | Gate | Gates, Field(discriminator="type")]


class Section(Shown):
    """What one cell shows: a title and items in reading order."""

    type: Literal["section"] = "section"
    title: str
    items: list[Item] = Field(default_factory=list)
    seconds: float | None = None

    @property
    def figures(self) -> list[Figure]:
        return [item for item in self.items if isinstance(item, Figure)]

    def html(self) -> str:
        return f"<h3>{escape_html(self.title)}</h3>" + "".join(item.html() for item in self.items)

    def markdown(self) -> str:
        return "\n\n".join([f"#### {escape_markdown(self.title)}", *(item.markdown() for item in self.items)])

    def plain(self) -> str:
        title = visible(self.title)
        return "\n\n".join([f"{title}\n{'=' * len(title)}", *(item.plain() for item in self.items)])

    def _repr_html_(self) -> str:
        return f"{NOTEBOOK_STYLE}<div class='labkit'>{self.html()}</div>"


# JupyterLab sanitises nothing inside an output's <style>, so it is scoped to our own class and uses Jupyter's variables for both themes.
NOTEBOOK_STYLE = """<style>
.labkit h3{margin:.2em 0 .5em;font-weight:600}.labkit h4{margin:1em 0 .3em;font-weight:600}
.labkit .scroll{overflow-x:auto;max-height:32em;overflow-y:auto}.labkit table{border-collapse:collapse;margin:0}
.labkit th,.labkit td{text-align:left!important;padding:.25em .8em!important;border-bottom:1px solid rgba(128,128,128,.25)!important;vertical-align:top}
.labkit .n{text-align:right!important;font-variant-numeric:tabular-nums;white-space:nowrap}.labkit .note{opacity:.75;font-size:.92em}
.labkit .pass .mark{color:#0a7d4f;white-space:nowrap}.labkit .fail .mark{color:#c8371b;white-space:nowrap}.labkit figure{margin:.8em 0}
.labkit figure img{max-width:100%;background:#fff}.labkit figcaption{font-size:.92em}.labkit figcaption span{opacity:.75}
</style>"""
