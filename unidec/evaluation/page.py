"""Pieces of a self-contained HTML page: style, tables, sections. Every text that goes through them is escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

STYLE = """
:root{--bg:#fff;--fg:#1c2430;--muted:#5b6675;--rule:#dde2e9;--soft:#f5f7fa;--good:#1b7f4b;--bad:#b3382c;
--s0:#2463a6;--s1:#c8610a;--s2:#2c8a57;--s3:#7d4bb5;--s4:#b83a5e;--s5:#64748b;--s6:#0e8a94;--s7:#8a6d1a}
@media (prefers-color-scheme:dark){:root{--bg:#12161c;--fg:#e3e8ef;--muted:#9aa6b5;--rule:#2d3642;--soft:#1a2028;
--good:#5bc98c;--bad:#f08a7d;--s0:#6fa8e8;--s1:#f0a052;--s2:#66c694;--s3:#b795ea;--s4:#ee8aa5;--s5:#9fb0c5;--s6:#5cc7d0;
--s7:#d8bd66}}
@media print{:root{--bg:#fff;--fg:#000;--muted:#444;--rule:#bbb;--soft:#fff;--good:#1b7f4b;--bad:#b3382c;--s0:#2463a6;
--s1:#c8610a;--s2:#2c8a57;--s3:#7d4bb5;--s4:#b83a5e;--s5:#64748b;--s6:#0e8a94;--s7:#8a6d1a}
nav{display:none}main{max-width:none;padding:0}section{break-inside:auto}figure,tr,.example{break-inside:avoid}
h2{break-after:avoid}body{font-size:10pt}}
*{box-sizing:border-box}html{color-scheme:light dark}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 24px 64px}
h1{font-size:27px;line-height:1.25;margin:0 0 4px}h2{font-size:20px;margin:40px 0 12px;padding-top:12px;
border-top:1px solid var(--rule)}h3{font-size:15px;margin:20px 0 6px}
p{margin:6px 0 12px;max-width:78ch}.muted,figcaption,.note{color:var(--muted)}.note{font-size:13px}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:16px 0 0;font-size:14px}a{color:var(--s0)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px;margin:6px 0 10px}
th,td{padding:5px 11px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
th{font-weight:600;color:var(--muted)}th:first-child,td:first-child,td.text,th.text{text-align:left}
td.text{white-space:normal;overflow-wrap:anywhere}tbody tr:hover{background:var(--soft)}b.best{color:var(--fg)}
tr.reference td{color:var(--muted)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:20px 28px}
figure{margin:0;min-width:0}figcaption{font-size:14px;margin:0 0 4px;color:var(--fg);font-weight:600}
svg{width:100%;height:auto;display:block}svg text{fill:var(--muted);font:12px system-ui,sans-serif}
svg .value{font-size:11px;fill:var(--fg)}svg .grid{stroke:var(--rule)}svg .base{stroke:var(--muted)}
svg .line{fill:none;stroke-width:2;stroke-linejoin:round}svg .dashed{stroke-dasharray:5 4;stroke-width:1.5}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px;color:var(--muted)}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:10px;margin:18px 0 4px}
.card{background:var(--soft);border:1px solid var(--rule);border-radius:8px;padding:9px 13px}
.card b{display:block;font-size:23px;line-height:1.2;font-variant-numeric:tabular-nums}.card span{color:var(--muted);
font-size:13px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:4px 28px;align-items:start}
.example{border:1px solid var(--rule);border-radius:8px;padding:10px 14px;margin:0 0 14px;overflow-wrap:anywhere}
.example h4{margin:0 0 6px;font-size:15px}.example table{width:100%;margin:0;font-size:13px}.example td,.example th{
padding:3px 8px}.example td.text{width:99%}
.right{color:var(--good);font-weight:600}.wrong{color:var(--bad);font-weight:600}
details summary{cursor:pointer;color:var(--s0)}
code{font:13px ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
"""

NUMBER_DIGITS = 2
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # no script, nothing loaded, whatever the texts hold


def document(title: str, sections: Sequence[str]) -> str:
    """The page: one HTML file that loads nothing."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
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
    """A chart with its caption, or nothing without a chart."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>" if svg else ""


def charts(*figures: str) -> str:
    """Figures beside each other."""
    body = "".join(figure for figure in figures if figure)
    return f'<div class="charts">{body}</div>' if body else ""


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], *, text_columns: int = 1, best: bool = False) -> str:
    """A table: `text_columns` of text, then numbers; `best` sets the largest of each column in bold."""
    if not rows:
        return ""
    tops = {}
    if best and len(rows) > 1:
        for c in range(text_columns, len(header)):
            values = [row[c] for row in rows if isinstance(row[c], int | float) and math.isfinite(row[c])]
            tops[c] = max(values, default=None)
    head = "".join(f"<th{_text(c, text_columns)}>{escape(str(name))}</th>" for c, name in enumerate(header))
    body = []
    for row in rows:
        cells = []
        for c, value in enumerate(row):
            shown = escape(number(value))
            if c in tops and value == tops[c]:
                shown = f'<b class="best">{shown}</b>'
            cells.append(f"<td{_text(c, text_columns)}>{shown}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    rows_html = "".join(body)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows_html}</tbody></table></div>'


def facts(values: Mapping[str, Any]) -> str:
    """A table of names and values; nested mappings get dotted names."""
    rows = list(flat(values).items())
    body = "".join(
        f'<tr><td>{escape(name)}</td><td class="text"><code>{escape(number(value, exact=True))}</code></td></tr>'
        for name, value in rows
    )
    return f'<div class="wide"><table><tbody>{body}</tbody></table></div>' if rows else ""


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
