"""Pieces of a self-contained HTML page: style, tables, sections. Every text that goes through them is escaped."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

STYLE = """
:root{--bg:#fff;--fg:#1c2430;--muted:#5b6675;--rule:#dde2e9;--soft:#f5f7fa;--good:#1b7f4b;--bad:#b3382c;
--s0:#2463a6;--s1:#c8610a;--s2:#2c8a57;--s3:#7d4bb5;--s4:#b83a5e;--s5:#64748b;--s6:#0e8a94;--s7:#8a6d1a}
@media (prefers-color-scheme:dark){:root{--bg:#12161c;--fg:#e3e8ef;--muted:#9aa6b5;--rule:#2d3642;--soft:#1a2028;
--good:#5bc98c;--bad:#f08a7d;--s0:#6fa8e8;--s1:#f0a052;--s2:#66c694;--s3:#b795ea;--s4:#ee8aa5;--s5:#9fb0c5;--s6:#5cc7d0;
--s7:#d8bd66}}
*{box-sizing:border-box}html{color-scheme:light dark;scroll-behavior:smooth}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1200px;margin:0 auto;padding:28px 24px 64px}
h1{font-size:27px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:20px;margin:40px 0 12px;padding-top:12px;border-top:1px solid var(--rule)}
h3{font-size:15px;margin:20px 0 6px}
p{margin:6px 0 12px;max-width:78ch;overflow-wrap:anywhere}.muted,.note{color:var(--muted)}.note{font-size:13px}
.skip{position:absolute;left:-999px}.skip:focus{left:12px;top:8px;padding:6px 12px;background:var(--soft)}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:16px 0 0;font-size:14px}a{color:var(--s0)}
a:focus-visible,summary:focus-visible,.wide:focus-visible{outline:2px solid var(--s0);outline-offset:2px}
.wide,.plot{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px;margin:6px 0 10px}
caption{text-align:left;font-weight:600;padding:6px 0 4px}
th,td{padding:5px 11px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
th{font-weight:600;color:var(--muted)}tbody th{font-weight:400;color:var(--fg)}
thead th{vertical-align:bottom;white-space:normal;min-width:5em}
th:first-child,td:first-child,td.text,th.text{text-align:left}tbody th{white-space:normal;min-width:9em;max-width:26em}
td.text{white-space:normal;overflow-wrap:anywhere}tbody tr:hover{background:var(--soft)}b.best{color:var(--fg)}
table.facts th{min-width:14em}
table.facts td{width:99%}.dense th,.dense td{padding:4px 6px}
.dense thead th{min-width:0}.dense tbody th{min-width:0;white-space:nowrap}
td small,th small{color:var(--muted);font-size:12px}.dense small{font-size:11px}
tr.base th,tr.base td{background:var(--soft)}
tr.reference th,tr.reference td{color:var(--muted)}
.charts{margin:0 0 14px;display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:20px 28px}
figure{margin:0;min-width:0}figcaption{font-size:14px;margin:0 0 4px;font-weight:600}
svg{width:100%;min-width:400px;height:auto;display:block}svg text{fill:var(--muted);font:12px system-ui,sans-serif}
svg .value{font-size:11px;fill:var(--fg)}svg .name{fill:var(--fg)}svg .grid{stroke:var(--rule)}
svg .base{stroke:var(--muted)}svg .line{fill:none;stroke-width:2;stroke-linejoin:round}
svg .dashed{stroke-dasharray:5 4;stroke-width:1.5}svg .again1{stroke-dasharray:8 3}svg .again2{stroke-dasharray:2 3}
svg .spread{stroke-width:2}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px;color:var(--muted)}
.legend i{display:inline-block;width:15px;height:10px;border-radius:2px;margin-right:5px;background:var(--c)}
.legend .again1{background:repeating-linear-gradient(90deg,var(--c) 0 5px,transparent 5px 7px)}
.legend .again2{background:repeating-linear-gradient(90deg,var(--c) 0 2px,transparent 2px 4px)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:10px;margin:18px 0 4px}
.card{background:var(--soft);border:1px solid var(--rule);border-radius:8px;padding:9px 13px}
.card b{display:block;font-size:23px;line-height:1.2;font-variant-numeric:tabular-nums}.card span{color:var(--muted);
font-size:13px}
.verdict,.warning{background:var(--soft);border-left:4px solid var(--s0);padding:8px 14px;max-width:none}
.warning{border-color:var(--bad)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:4px 28px;align-items:start}
.example{border:1px solid var(--rule);border-radius:8px;padding:10px 14px;margin:0 0 14px;overflow-wrap:anywhere}
.example h4{margin:0 0 6px;font-size:15px}.example table{width:100%;margin:0;font-size:13px}.example td,.example th{
padding:3px 8px}.example thead th{min-width:0;white-space:nowrap}.example td.text{width:99%}
.right{color:var(--good);font-weight:600}.wrong{color:var(--bad);font-weight:600}
details{margin:4px 0 12px}details summary{cursor:pointer;color:var(--s0)}
code{font:13px ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere;white-space:pre-wrap}
@media (max-width:900px){.wide tr>:first-child{position:sticky;left:0;background:var(--bg)}
.wide tr.base>:first-child{background:var(--soft)}}
@media (max-width:600px){main{padding:16px 14px 48px}th,td{padding:4px 7px}thead th{min-width:0}
table.facts th{min-width:9em}}
@media print{:root{--bg:#fff;--fg:#000;--muted:#444;--rule:#bbb;--soft:#fff;--good:#1b7f4b;--bad:#b3382c;--s0:#2463a6;
--s1:#c8610a;--s2:#2c8a57;--s3:#7d4bb5;--s4:#b83a5e;--s5:#64748b;--s6:#0e8a94;--s7:#8a6d1a}
@page{margin:13mm}html{color-scheme:light;print-color-adjust:exact;-webkit-print-color-adjust:exact}
body{font-size:9.5pt}nav,.skip{display:none}main{max-width:none;padding:0}h1{font-size:17pt}
h2{font-size:13pt;margin-top:18pt;break-after:avoid}h3,figcaption,caption{break-after:avoid}.wide,.plot{overflow:visible}svg{min-width:0}
table{font-size:7.5pt}td small,th small{font-size:6pt}th,td{padding:2pt 4pt}thead th{min-width:0}tbody th{min-width:6em}
thead{display:table-header-group}
figure,tr,.example,.card{break-inside:avoid}.charts{grid-template-columns:1fr 1fr;gap:10pt 14pt}
.pair{grid-template-columns:1fr 1fr;gap:4pt 12pt}.example table{font-size:7pt}
.example h4,h3,figcaption{font-size:8.5pt}.note,.legend,.example .note{font-size:7.5pt}code{font-size:7.5pt}
.legend i{height:7px}.charts,section p{margin-bottom:8pt}.card{padding:4pt 8pt}.card b{font-size:14pt}
.cards{grid-template-columns:repeat(6,1fr)}.example{padding:5pt 8pt}
details::details-content{content-visibility:visible;block-size:auto;display:block}summary{list-style:none}}
"""

NUMBER_DIGITS = 2
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # no script, nothing loaded, whatever the texts hold


def document(title: str, sections: Sequence[str]) -> str:
    """The page: one HTML file that loads nothing."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>"
        '<a class="skip" href="#content">to the content</a><main id="content">\n'
        + "\n".join(section for section in sections if section)
        + "\n</main></body></html>\n"
    )


def section(anchor: str, heading: str, *parts: str) -> str:
    """A section with a heading, or nothing where all parts are empty."""
    body = "\n".join(part for part in parts if part)
    return f'<section id="{escape(anchor)}"><h2>{escape(heading)}</h2>\n{body}\n</section>' if body else ""


def note(text: str) -> str:
    """A line of explanation."""
    return f'<p class="note">{escape(text)}</p>'


def figure(caption: str, svg: str) -> str:
    """A chart with its caption, or nothing without a chart; it scrolls within itself where it is too wide."""
    if not svg:
        return ""
    return f'<figure><figcaption>{escape(caption)}</figcaption><div class="plot">{svg}</div></figure>'


def charts(*figures: str) -> str:
    """Figures beside each other."""
    body = "".join(figure for figure in figures if figure)
    return f'<div class="charts">{body}</div>' if body else ""


def folded(summary: str, body: str, opened: bool = False) -> str:
    """Something to open and close; on paper it is open."""
    state = " open" if opened else ""
    return f"<details{state}><summary>{escape(summary)}</summary>{body}</details>" if body else ""


def navigation(links: Sequence[tuple[str, str]]) -> str:
    """Links to sections: (anchor, heading)."""
    body = "".join(f'<a href="#{escape(anchor)}">{escape(heading)}</a>' for anchor, heading in links)
    return f'<nav aria-label="sections">{body}</nav>' if body else ""


@dataclass(frozen=True)
class Shown:
    """A table's cell that shows more than a number.

    Attributes:
        text: in the cell. value: what is compared for the best of the column. small: after the text, in small print.
        kind: "right" or "wrong" colours the cell.
    """

    text: str
    value: float = math.nan
    small: str = ""
    kind: str = ""


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    text_columns: int = 1,
    best: bool = False,
    lowest: Collection[int] = (),
    kinds: Sequence[str] = (),
    caption: str = "",
    dense: bool = False,
) -> str:
    """A table: `text_columns` of text, then numbers or `Shown`.

    Args:
        best: the largest value of each column is set in bold; of the columns `lowest`, the smallest.
        kinds: a CSS class for each row ("base", "reference" or "").
        caption: shown above; also what the region is called that the keyboard can scroll.
        dense: less room between columns, for wide tables.
    """
    if not rows:
        return ""
    tops = _tops(header, rows, text_columns, lowest) if best and len(rows) > 1 else {}
    head = "".join(f'<th scope="col"{_text(c, text_columns)}>{escape(str(name))}</th>' for c, name in enumerate(header))
    body = []
    for r, row in enumerate(rows):
        kind = f' class="{escape(kinds[r])}"' if r < len(kinds) and kinds[r] else ""
        cells = "".join(_cell(c, value, text_columns, tops.get(c)) for c, value in enumerate(row))
        body.append(f"<tr{kind}>{cells}</tr>")
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    region = f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption or "table", quote=True)}">'
    close = ' class="dense"' if dense else ""
    return f"{region}<table{close}>{title}<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"


def _tops(
    header: Sequence[str], rows: Sequence[Sequence[Any]], text_columns: int, lowest: Collection[int]
) -> dict[int, float]:
    tops = {}
    for c in range(text_columns, len(header)):
        values = [value for row in rows if math.isfinite(value := _value(row[c]))]
        if len(values) == 1 or len(set(values)) > 1:  # where all are the same none is best
            tops[c] = min(values) if c in lowest else max(values)
    return tops


def _value(cell: Any) -> float:
    """What is compared of a cell, NaN for nothing."""
    if isinstance(cell, Shown):
        return cell.value
    return float(cell) if isinstance(cell, int | float) and not isinstance(cell, bool) else math.nan


def _cell(column: int, value: Any, text_columns: int, top: float | None) -> str:
    shown = escape(value.text if isinstance(value, Shown) else number(value))
    if top is not None and _value(value) == top:
        shown = f'<b class="best">{shown}</b>'
    if isinstance(value, Shown) and value.small:
        shown += f"<small>{escape(value.small)}</small>"
    if column == 0 and text_columns:
        return f'<th scope="row">{shown}</th>'
    kinds = [k for k in ("text" * (column < text_columns), value.kind if isinstance(value, Shown) else "") if k]
    named = f' class="{escape(" ".join(kinds))}"' if kinds else ""
    return f"<td{named}>{shown}</td>"


def facts(values: Mapping[str, Any]) -> str:
    """A table of names and values; nested mappings get dotted names."""
    rows = list(flat(values).items())
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        f'<td class="text"><code>{escape(number(value, exact=True))}</code></td></tr>'
        for name, value in rows
    )
    return f'<table class="facts"><tbody>{body}</tbody></table>' if rows else ""


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out


def number(value: Any, *, exact: bool = False) -> str:
    """A value as people read it: two decimals, thousands apart, a dash for none; `exact` keeps all digits."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value) if exact else f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}" if exact else f"{value:,.{NUMBER_DIGITS}f}"
    if isinstance(value, list | tuple):
        return ", ".join(number(item, exact=exact) for item in value)
    return str(value)


def _text(column: int, text_columns: int) -> str:
    return ' class="text"' if column < text_columns else ""
