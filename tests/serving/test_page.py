"""The page in a headless Chromium: what a person types, presses and reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import page_server, served_bundle
from helpers.browser import Browser, program
from helpers.page_server import RunningApp

pytest.importorskip("uvicorn")
pytest.importorskip("websockets")

from starlette.applications import Starlette
from starlette.testclient import TestClient

from unidec.serving import page

ROWS = "[...document.querySelectorAll('#labels .row')]"
TITLES = f"{ROWS}.map((row) => row.querySelector('.title').firstChild.textContent)"
IDLE = "!document.querySelector('#labels').hasAttribute('aria-busy')"
FOCUS = "document.activeElement.closest('li[data-uid]')?.dataset.uid ?? document.activeElement.id"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if program() is None:
        pytest.skip("no Chromium is installed")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    page_stub = page_server.PageServer()
    running = page_server.RunningApp(page_stub.app)
    page_stub.address = running.address
    yield page_stub
    running.stop()


@pytest.fixture
def tab(chromium: Any, server: Any) -> Iterator[Any]:
    """A tab of a wide window; afterwards: no script failed, and nothing but the server
    was asked.
    """
    server.reset()
    chromium.look()
    chromium.problems.clear()
    chromium.asked.clear()
    yield chromium
    complaints = [text for text in chromium.problems if "Failed to load resource" not in text]
    assert complaints == []
    assert {address.split("/", 3)[2] for address in chromium.asked} == {
        server.address.split("/")[2]
    }


def search(tab: Any, server: Any, text: str, count: int) -> None:
    """The page opened, the text typed, so many labels there: those of the whole text."""
    tab.open(server.address)
    typed(tab, text, count)


def typed(tab: Any, text: str, count: int) -> None:
    """The text typed, so many labels there."""
    tab.type(text)
    tab.until(
        f"{ROWS}.length === {count} && document.title.startsWith({json.dumps(text[:60])}) && {IDLE}"
    )


def test_files_hold_to_the_policy() -> None:
    client = TestClient(Starlette(routes=list(page.page_routes())))
    files = {path: client.get(path).text for path in page.PAGE_PATHS}
    folder = Path(page.__file__).parent
    names = {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    assert names == {"index.html" if path == "/" else path.removeprefix("/page/") for path in files}
    for path, text in files.items():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|@import", text
        ), path
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), (
            f"{path} names another server"
        )
        assert " style=" not in text and " on" + "click=" not in text
    links = re.findall(r'(?:src|href)="([^"#]+)"', files["/"])
    assert {link for link in links if link.startswith("page/")} == {
        "page/icon.svg",
        "page/page.css",
        "page/page.js",
    }
    assert all(not link.startswith("/") for link in links), "behind a prefix, / is somebody else's"
    for path in page.PAGE_PATHS:
        first = client.get(path)
        assert first.status_code == 200
        policy = dict(
            part.split(" ", 1) for part in first.headers["content-security-policy"].split("; ")
        )
        assert (
            policy["default-src"] == "'none'"
            and policy["script-src"] == policy["connect-src"] == "'self'"
        )
        assert client.head(path).headers["content-length"] == str(len(first.content))
        assert client.post(path).status_code == 405


def test_feedback_buttons(tab: Any, server: Any) -> None:
    marks = "[...document.querySelectorAll('#labels li:first-child .marks button')]"
    pressed = f"{marks}.map((button) => button.getAttribute('aria-pressed')).join()"
    search(tab, server, "old red house", 10)
    assert tab.ask(f"{marks}.length") == 0, "the server keeps none"
    assert "probability" in tab.ask("document.querySelector('#meaning').textContent")
    server.marks = []
    search(tab, server, "old red house", 10)
    assert tab.ask(pressed) == "false,false"
    for place, shown in ((0, "true,false"), (1, "false,true")):
        tab.ask(f"{marks}[{place}].click()")
        tab.until(f"{pressed} === '{shown}'")
    mark = {"query": "old red house", "label": server.ranked({"k": 1}, "old red house")[0]["uid"]}
    expected = [{**mark, "relevant": True}, {**mark, "relevant": False}]
    assert server.marks == expected
    assert tab.ask("document.querySelector('#why')") is None  # a mark opens nothing
    tab.ask(f"{marks}[0].click()")
    tab.until(
        "document.querySelector('#status').textContent.startsWith('The feedback was not saved')"
    )
    assert tab.ask(pressed) == "false,true"
    # it is remembered
    for text, shown in (("red car", "false,false"), ("old red house", "false,true")):
        tab.ask("document.querySelector('#clear').click()")
        typed(tab, text, 10)
        assert tab.ask(pressed) == shown


def test_labels_while_typing(tab: Any, server: Any) -> None:
    search(tab, server, "old red house", 10)
    want = [label["title"] for label in server.ranked({"k": 10}, "old red house")]
    assert tab.ask(TITLES) == want
    assert want[0] == "old red house"
    expected = {"queries": ["old red house"], "k": 10}
    assert server.bodies[-1] == expected
    scores = tab.ask(f"{ROWS}.map((row) => row.querySelector('.score').firstChild.textContent)")
    first = server.ranked({"k": 10}, "old red house")[0]
    assert scores[0] == f"{first['score']:.3f}"
    # what a score means is seen, told on hover, and read aloud
    likely = tab.ask(f"{ROWS}.map((row) => row.querySelector('.score small').textContent)")
    assert likely[0] == f"{100 * first['probability']:.0f} %"
    assert "< 1 %" in likely
    hint = tab.ask(f"{ROWS}[0].querySelector('.score small').title")
    assert hint.startswith("probability that this label is relevant: ")
    assert "validation split" in hint
    assert f"relevant with a probability of {likely[0]}" in tab.ask(
        f"{ROWS}[0].getAttribute('aria-label')"
    )
    # the address holds what is shown; the model is named; the best score stands among others
    assert tab.ask("location.search") == "?q=old+red+house"
    assert "version 3" in tab.ask("document.querySelector('#facts').textContent")
    assert "12 labels" in tab.ask("document.querySelector('#served').textContent")
    assert "validation queries" in tab.ask("document.querySelector('#status').textContent")
    tab.press("Escape")
    tab.until(f"{ROWS}.length === 0 && location.search === ''")
    # keys in quick succession ask once
    num = len(server.bodies)
    tab.ask(
        "[...'old house'].forEach((key) => { const query = document.querySelector('#query'); "
        "query.value += key; query.dispatchEvent(new Event('input', {bubbles: true})) })"
    )
    tab.until(f"{ROWS}.length === 10")
    queries = [body["queries"] for body in server.bodies[num:]]
    assert queries == [["old house"]]


def test_a_late_answer_never_replaces_a_newer_one(tab: Any, server: Any) -> None:
    server.held = True
    tab.open(server.address)
    tab.type("red")
    tab.until("document.querySelector('#labels[aria-busy]') && document.title.startsWith('red ')")
    tab.type(" boat")
    tab.until(f"{ROWS}.length === 10 && document.title.startsWith('red boat')")
    tab.until(IDLE)
    first = tab.ask(TITLES)
    assert first[0] == "red boat"
    assert server.bodies[0]["queries"] == ["red"]
    server.held = False
    tab.ask("new Promise((done) => setTimeout(done, 300))")
    assert (
        tab.ask(TITLES) == first and tab.ask("document.querySelector('#alert').textContent") == ""
    )


def test_bars_show_what_each_part_adds(tab: Any, server: Any) -> None:
    search(tab, server, "red boat", 10)
    weights = {"de": 1.0, "clf": 2.0, "knn": 0.5}
    labels = server.ranked({"k": 10}, "red boat")
    sums = [[label[name] * weight for name, weight in weights.items()] for label in labels]
    low = min(sum(x for x in parts if x < 0) for parts in sums)
    high = max(sum(x for x in parts if x > 0) for parts in sums)
    assert low < 0, "the case must hold a part that takes away"
    bars = tab.ask(
        f"{ROWS}.map((row) => Object.fromEntries([...row.querySelectorAll('.bar i')]"
        ".map((bit) => [bit.className, [parseFloat(bit.style.left), "
        "parseFloat(bit.style.width)]])))"
    )
    for parts, bar in zip(sums, bars, strict=True):
        right = left = -low
        for name, adds in zip(weights, parts, strict=True):
            if adds < 0:
                left += adds
            start, width = bar[name]
            expected = 100 * (left if adds < 0 else right) / (high - low)
            assert start == pytest.approx(expected, abs=0.01)
            assert width == pytest.approx(100 * abs(adds) / (high - low), abs=0.01)
            right += max(adds, 0)


@pytest.mark.parametrize("calibrated", [True, False])
def test_where_a_fusion_ranks_the_bars_follow_its_probability_or_score(
    tab: Any, server: Any, calibrated: bool
) -> None:
    server.fused = True
    server.calibrated = calibrated
    server.model = "3" * 64  # another card
    search(tab, server, "red boat", 10)
    labels = server.ranked({"k": 10}, "red boat")
    sums = [
        sum(label[name] * weight for name, weight in {"de": 1.0, "clf": 2.0, "knn": 0.5}.items())
        for label in labels
    ]
    assert sums != sorted(sums, reverse=True), (
        "the case must have sums in another order than the scores"
    )
    bars = tab.ask(
        f"{ROWS}.map((row) => [...row.querySelectorAll('.bar i')]"
        ".map((bit) => [bit.className, parseFloat(bit.style.width)]))"
    )
    chances = [
        label["probability"] if calibrated else 1 / (1 + math.exp(-label["score"]))
        for label in labels
    ]
    for [[kind, width]], chance in zip(bars, chances, strict=True):
        assert kind == "fused"
        expected = 100 * chance / chances[0]
        assert width == pytest.approx(expected, abs=0.01)
    assert tab.ask(
        "[...document.querySelectorAll('#legend li')].map((one) => one.textContent)"
    ) == ["learnt fusion of all parts"]
    shown = "probability" if calibrated else "score of the learnt fusion"
    assert f"Bar: the {shown}, relative to the best label" in tab.ask(
        "document.querySelector('#meaning').textContent"
    )
    tab.click("#head label:nth-of-type(2)")  # one head alone: its own bars
    tab.until("document.querySelector('#legend li').textContent === 'dual encoder'")
    assert tab.ask(f"{ROWS}.every((row) => row.querySelector('.bar i').className === 'de')")


def test_keyboard_alone(tab: Any, server: Any) -> None:
    search(tab, server, "red", 10)
    best = [label["uid"] for label in server.ranked({"k": 10}, "red")]
    tab.press("ArrowDown")
    assert tab.ask(FOCUS) == best[0]
    tab.press("ArrowDown", "End")
    assert tab.ask(FOCUS) == best[-1]
    tab.press("Home", "ArrowDown", "Enter")
    tab.until("document.querySelector('#why table')")
    assert (
        tab.ask("document.querySelector('[aria-expanded=true]').closest('li').dataset.uid")
        == best[1]
    )
    cells = tab.ask(
        "[...document.querySelectorAll('#why tbody tr')].map((row) => row.lastChild.textContent)"
    )
    total, likely = tab.ask(
        "[...document.querySelectorAll('#why tfoot tr')].map((row) => row.lastChild.textContent)"
    )
    assert float(total) == pytest.approx(sum(float(x.replace("−", "-")) for x in cells), abs=2e-3)
    expected = f"{50 * float(total):.0f} %"
    assert likely == expected, "the stub's probability is half the score"
    tab.press("Escape")
    assert tab.ask("document.querySelector('#why')") is None and tab.ask(FOCUS) == best[1]
    tab.press("Delete")
    tab.until(f"!{ROWS}.some((row) => row.closest('li').dataset.uid === '{best[1]}')")
    deny = server.bodies[-1]["deny"]
    assert deny == [best[1]]
    assert tab.ask(FOCUS) == best[2]
    tab.press("Escape")
    assert tab.ask(FOCUS) == "query"
    tab.press("ArrowDown", "ArrowUp")
    assert tab.ask(FOCUS) == "query"
    tab.press("ArrowDown")
    tab.type("/")
    assert tab.ask(FOCUS) == "query"
    assert tab.ask("getSelection().toString()") == "red"


def test_why_shows_tokens_and_training_queries_as_text(tab: Any, server: Any) -> None:
    search(tab, server, "red zzz <b>", 10)
    assert "1 token of the query unknown" in tab.ask(
        "document.querySelector('#status').textContent"
    )
    tab.click("#labels li[data-uid=L0] .row")
    tab.until("document.querySelector('#why .near')")
    tokens = tab.ask(
        "[...document.querySelectorAll('#why .tokens li')].map((one) => [one.textContent, "
        "one.className])"
    )
    expected = [["red", ""], ["zzz", "unknown"], ["<b>", ""]]
    assert tokens == expected
    near = tab.ask("document.querySelector('#why .near li').textContent")
    assert near.startswith("a <i>red</i> one ✓0.90has this label")
    # titles of labels and of data sets are text too
    assert tab.ask("document.title").startswith("red zzz <b>")
    assert (
        tab.ask(
            "document.querySelectorAll('#labels img, #labels b:not(.zero), #facts b, #why "
            "i:empty:not([class])').length"
        )
        == 0
    )
    assert "<img src=x" in tab.ask("document.querySelector('#labels').textContent")


def test_filters_reach_the_server_and_the_address(tab: Any, server: Any) -> None:
    search(tab, server, "red", 10)
    tab.click("#allow-search")
    tab.type("house")
    tab.until("document.querySelectorAll('#allow-found [role=option]').length === 4")
    assert (
        tab.ask("document.querySelector('#allow-search').getAttribute('aria-activedescendant')")
        == "allow-found-0"
    )
    tab.press("ArrowDown", "Enter")
    tab.until(f"{ROWS}.length === 1")
    tab.type("gr")
    tab.until(
        "document.querySelector('#allow-found [role=option]')?.textContent.startsWith('green')"
    )
    tab.press("ArrowUp", "Enter")
    tab.until(f"{ROWS}.length === 2")
    tab.click("#head label:nth-of-type(2)")
    tab.click("#min")
    tab.type("-1")
    tab.until(
        "document.querySelector('#active').textContent === '3 on' && "
        "location.search.includes('min=')"
    )
    want = {
        "queries": ["red"],
        "k": 10,
        "allow": ["L7", "a/b c?"],
        "head": "de",
        "min_score": -1,
    }
    tab.until(f"location.search.includes('min=-1') && {IDLE}")
    assert server.bodies[-1] == want
    assert tab.ask("document.querySelector('.score small')") is None, (
        "one head alone has no probabilities"
    )
    command = tab.ask("document.querySelector('#curl').textContent")
    assert json.loads(command.split(" -d ")[1].strip("'")) == want
    # the address alone brings it all back; a label that is gone is reported as gone
    address = tab.ask("location.href")
    tab.open(address + "&deny=gone")
    tab.until("document.querySelector('#deny .chips .unknown')")
    tab.until("document.querySelector('#allow .chips').textContent.includes('new house')")
    assert server.bodies[-1] == {**want, "deny": ["gone"]}
    tab.click("#reset")
    tab.until(f"location.search === '?q=red' && {ROWS}.length === 10 && {IDLE}")
    expected = {"queries": ["red"], "k": 10}
    assert server.bodies[-1] == expected


def test_a_wrong_request_says_what_to_do_and_a_busy_server_is_asked_again(
    tab: Any, server: Any
) -> None:
    tab.open(server.address + "/?q=bad")
    tab.until("document.querySelector('#alert').textContent")
    text = tab.ask("document.querySelector('#alert').innerText")
    assert (
        "The query is wrong" in text and "Got: <b>bad</b>" in text and "Write another one" in text
    )
    server.busy = 1_000
    tab.press("Escape")
    tab.type("red")
    tab.until("document.querySelector('#alert.wait')")
    text = tab.ask("document.querySelector('#alert').innerText")
    assert (
        "Too many queries waiting" in text
        and "Retrying in 1 s" in text
        and "Retry-After" not in text
    )
    server.busy = 1
    tab.until(f"{ROWS}.length === 10 && !document.querySelector('#alert').textContent")


def test_a_server_that_is_away_is_waited_for(tab: Any, server: Any) -> None:
    search(tab, server, "red", 10)
    tab.call(
        "Network.emulateNetworkConditions",
        offline=True,
        latency=0,
        downloadThroughput=-1,
        uploadThroughput=-1,
    )
    try:
        tab.type(" car")
        tab.until("document.querySelector('#alert').innerText.includes('does not answer')")
        assert tab.ask("document.querySelector('#labels').className") == "labels old"
    finally:
        tab.call(
            "Network.emulateNetworkConditions",
            offline=False,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )
    tab.until(
        "!document.querySelector('#alert').textContent && !document.querySelector('#labels.old')"
    )


def test_a_key_is_asked_for_and_kept_nowhere(tab: Any, server: Any) -> None:
    server.key = "secret key"
    tab.call("Page.navigate", url=server.address + "/?q=red")
    tab.until("document.querySelector('#key')")
    tab.click("#key")
    tab.type("wrong")
    tab.press("Enter")
    tab.until("document.querySelector('#alert b').textContent.includes('key is wrong')")
    tab.click("#key")
    tab.type("secret key")
    tab.press("Enter")
    tab.until(f"{ROWS}.length === 10 && !document.querySelector('#alert').textContent")
    assert server.authorizations[-1] == "Bearer secret key"
    kept = tab.ask(
        "JSON.stringify([location.href, {...localStorage}, {...sessionStorage}, document.cookie])"
    )
    assert "secret" not in kept
    assert "$UNIDEC_API_KEY" in tab.ask("document.querySelector('#curl').textContent")


def test_another_model_brings_its_card(tab: Any, server: Any) -> None:
    search(tab, server, "red", 10)
    server.model = "2" * 64
    tab.type(" car")
    tab.until("document.querySelector('#facts').textContent.includes('222222222222')")
    assert "has switched to this model" in tab.ask("document.querySelector('#facts').textContent")


# texts whose contrast with what lies behind them is below WCAG's 4.5
CONTRAST = """(() => {
  const paper = document.createElement("canvas").getContext("2d");
  const rgb = (text) => {
    paper.fillStyle = text;
    paper.fillRect(0, 0, 1, 1);
    return [...paper.getImageData(0, 0, 1, 1).data];
  };
  const part = (x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) =>
    0.2126 * part(r / 255) + 0.7152 * part(g / 255) + 0.0722 * part(b / 255);
  const clear = (one) => getComputedStyle(one).backgroundColor.endsWith(", 0)");
  const behind = (one) =>
    clear(one) ? behind(one.parentElement) : getComputedStyle(one).backgroundColor;
  const poor = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !one.checkVisibility() || one.closest("noscript, .skip")) continue;
    const both = [light(rgb(getComputedStyle(one).color)), light(rgb(behind(one)))];
    const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    if (contrast < 4.5) poor.push([one.outerHTML.slice(0, 80), contrast]);
  }
  return poor;
})()"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 320])
def test_light_dark_wide_and_narrow_are_readable(
    tab: Any, server: Any, dark: bool, width: int
) -> None:
    tab.look(width, 800, dark=dark)
    tab.open(server.address + "/?q=old+zzz+house&deny=gone")
    tab.until(f"{ROWS}.length === 10")
    tab.click("#labels li:nth-child(2) .row")
    tab.until("document.querySelector('#why table') && document.querySelector('.chips .unknown')")
    tab.ask("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask("getComputedStyle(document.body).backgroundColor") == (
        "rgb(18, 22, 28)" if dark else "rgb(255, 255, 255)"
    )
    assert tab.ask(CONTRAST) == []
    tab.ask("document.querySelector('#query').value = 'bad'")
    tab.ask("document.querySelector('#ask').requestSubmit()")
    tab.until("document.querySelector('#alert').textContent")
    assert tab.ask(CONTRAST) == []


def test_colours_chosen_by_hand_stay(tab: Any, server: Any) -> None:
    tab.look(dark=True)
    tab.open(server.address)
    tab.click("#theme")
    assert tab.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tab.open(server.address + "/?q=red")
    assert tab.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tab.click("#theme")
    tab.click("#theme")
    assert tab.ask("document.documentElement.dataset.theme ?? 'system'") == "system"
    tab.ask("localStorage.clear()")


def test_everything_that_can_be_used_has_a_name(tab: Any, server: Any) -> None:
    search(tab, server, "red", 10)
    tab.press("ArrowDown", "Enter")
    tab.until("document.querySelector('#why table')")
    tab.call("Accessibility.enable")
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    used = [node for node in nodes if not node.get("ignored")]
    roles = {
        "button",
        "textbox",
        "combobox",
        "spinbutton",
        "radio",
        "link",
        "listbox",
        "list",
        "group",
        "search",
    }
    seen = {}
    for node in used:
        role = node.get("role", {}).get("value", "")
        name = node.get("name", {}).get("value", "")
        seen.setdefault(role, []).append(name)
    for role in roles - {"list", "group", "search", "listbox"}:
        assert seen[role] and all(seen[role]), role
    assert any(
        re.fullmatch(r"1\. red \w+, score .+: dual encoder .+, classifier .+", name)
        for name in seen["button"]
    )
    assert "status" in seen
    assert "alert" in seen
    assert "main" in seen
    assert "complementary" in seen


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The server itself, with a bundle of 400 labels whose training queries vote."""
    from unidec.config import Serve
    from unidec.serving.app import create_app
    from unidec.serving.engine import Engine, Service

    settings = Serve(threads=1, max_k=50)
    service = Service(settings)
    service.swap(
        Engine.load(served_bundle.make_served_bundle(tmp_path_factory.mktemp("served")), settings)
    )
    running = RunningApp(create_app(service, settings))
    yield SimpleNamespace(address=running.address, text=served_bundle.text, engine=service.current)
    running.stop()


def test_the_page_and_the_server_fit(chromium: Any, real: Any) -> None:
    chromium.look()
    chromium.problems.clear()
    text = real.text(7)
    chromium.open(real.address)
    examples = chromium.ask(
        "[...document.querySelectorAll('#start button')].map((one) => one.textContent)"
    )
    assert len(examples) == 6
    assert len(set(examples)) == 6
    typed(chromium, f"{text} unknownword", 10)
    assert "1 token of the query unknown" in chromium.ask(
        "document.querySelector('#status').textContent"
    )
    want = real.engine.bundle.predict([f"{text} unknownword"], 10)[0]
    assert chromium.ask(TITLES) == want.titles
    assert chromium.ask(f"{ROWS}.map((row) => row.querySelector('.score').textContent)") == [
        f"{score:.3f}".replace("-", "−") for score in want.scores
    ]
    parts = "[...document.querySelectorAll('#legend li')].map((one) => one.textContent)"
    assert chromium.ask(parts) == ["dual encoder", "classifier × 0.3", "votes × 0.2"]
    chromium.press("ArrowDown", "Enter")
    chromium.until("document.querySelector('#why .near')")
    near = chromium.ask(
        "[...document.querySelectorAll('#why .near li span:first-child')].map((one) => "
        "one.textContent)"
    )
    assert near[0].removesuffix(" ✓") == text
    assert len(near) == 5
    tokens = chromium.ask(
        "[...document.querySelectorAll('#why .tokens li')].map((one) => [one.textContent, "
        "one.className])"
    )
    assert tokens == [*([word, ""] for word in text.split()), ["[UNK]", "unknown"]]
    sums = chromium.ask(
        "[...document.querySelectorAll('#why tr')].map((row) => row.lastChild.textContent)"
    )
    adds = [float(cell.replace("−", "-")) for cell in sums[1:]]
    assert sum(adds[:-1]) == pytest.approx(adds[-1], abs=2e-3)
    facts = chromium.ask("document.querySelector('#facts').innerText")
    assert real.engine.identity.sha256[:12] in facts
    assert "60 queries" in facts
    assert "400" in facts
    # one head alone, a label to choose from, a limit of the server
    chromium.click("#head label:nth-of-type(3)")
    chromium.until("document.querySelectorAll('#legend li').length === 1")
    chromium.click("#allow-search")
    chromium.type(text.split()[0])
    chromium.until("document.querySelectorAll('#allow-found [role=option]').length > 3")
    chromium.press("Enter")
    chromium.until(f"{ROWS}.length === 1")
    chromium.ask("document.querySelector('#k').value = 999")
    chromium.click("#k")
    chromium.press("ArrowDown")
    chromium.until(
        "document.querySelector('#k').value === '50' || location.search.includes('k=50')"
    )
    assert chromium.problems == []
