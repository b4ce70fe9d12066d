"""The verdict of `validate_dataset` as one page of its own; Data Docs load their style from the network."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --back: #fff; --soft: #f4f6f8; --line: #d8dee4; --dim: #5b6570;
  --good: #1a7f37; --bad: #c0262d; --warn: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ec; --back: #14171a; --soft: #1d2126; --line: #343a41;
  --dim: #9aa4ae; --good: #4ac26b; --bad: #ff6b6b; --warn: #e3b341; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0 auto;
  max-width: 70rem; padding: 2rem 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.facts { color: var(--dim); margin: 0 0 1rem; overflow-wrap: anywhere; }
.verdict { display: inline-block; font-weight: 600; padding: .15rem .7rem; border-radius: 1rem;
  border: 1px solid currentColor; }
.pass { color: var(--good); } .critical { color: var(--bad); } .warning { color: var(--warn); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; color: var(--dim); }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:hover td { background: var(--soft); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
summary { cursor: pointer; } code { font-size: .9em; overflow-wrap: anywhere; }
"""


def render_page(verdict: dict[str, Any], docs: bool) -> str:
    """Verdict to HTML: no scripts, nothing loaded from elsewhere, light and dark."""
    failed, warned = len(verdict["failed"]), len(verdict["warnings"])
    state, words = ("pass", "passed") if verdict["success"] else ("critical", f"failed: {failed} critical")
    if verdict["success"] and warned:
        state, words = "warning", f"passed with {warned} warning{'s' if warned > 1 else ''}"
    rows = verdict["rows"]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>",
        f"<title>Validation of {escape(verdict['name'])}</title><style>{_STYLE}</style>",
        f"<h1>Validation of {escape(verdict['name'])}</h1>",
        f"<p class='facts'>{rows['queries']:,} queries, {rows['labels']:,} labels, {rows['pairs']:,} pairs; "
        f"sha256 <code>{escape(verdict['dataset_sha256'])}</code></p>",
        f"<p><span class='verdict {state}'>{words}</span></p>",
    ]
    for table in rows:
        results = [r for r in verdict["expectations"] if r["table"] == table]
        body = "".join(_row(result) for result in results)
        head = (
            "<tr><th>Expectation</th><th>Result</th><th class='number'>Unexpected</th><th class='number'>Of</th></tr>"
        )
        parts.append(f"<h2>{table.capitalize()}</h2><div class='wide'><table>{head}{body}</table></div>")
    if docs:
        link = "<a href='docs/index.html'>Data Docs of Great Expectations</a>"
        parts.append(f"<p>{link} (styled only where there is a network)</p>")
    return "\n".join(parts) + "\n"


def _row(result: dict[str, Any]) -> str:
    state = "pass" if result["success"] else result["severity"]
    what = escape(result["description"])
    if result["samples"]:
        lines = "".join(f"<li><code>{escape(_sample(sample))}</code></li>" for sample in result["samples"])
        what = f"<details><summary>{what}</summary><ul>{lines}</ul></details>"
    count = f"{result['unexpected_count']:,}" if result["element_count"] else ""
    observed = result["element_count"] or result["observed"]
    total = f"{observed:,}" if isinstance(observed, int) else escape(str(observed or ""))
    numbers = f"<td class='number'>{count}</td><td class='number'>{total}</td>"
    return f"<tr><td>{what}</td><td class='{state}'>{state}</td>{numbers}</tr>"


def _sample(sample: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sample.items() if value is not None)
