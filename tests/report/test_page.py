import base64
import dataclasses
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.headless_chromium import CHROMIUM, NAMES, Chromium
from helpers.methods import SMALL

from dlmi import DLMI, Inverter
from dlmi.report.blocks import Figure, ModelText, ReportTable, format_cell
from dlmi.report.loading import Group, ReportData, Series
from dlmi.report.page import TRACE_POINTS, thin_trace, write_page
from dlmi.report.result_files import Budget
from dlmi.rows import TracePoint

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason=f"needs Chromium: none of {', '.join(NAMES)} is on the PATH"
)

HOSTILE = '<script>window.hit=1;alert(1)</script>"><img src=x onerror="window.hit=1">\x1b[31m\u202e'
# The same as the page shows it: control and bidi characters spelled out.
HOSTILE_SHOWN = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><rect id="a" width="9" height="9"/></svg>'  # noqa: E501


@pytest.fixture(scope="module")
def made():
    return {}


@pytest.fixture
def row(made, fit, data):
    """A row of a real search; made once."""
    if not made:
        made.update(fit(Inverter(DLMI(tau0=1.0), **SMALL), data()))
    return next(iter(made.values()))


def loaded(*series, notes=(), **changes):
    """Results as they are read, of one group."""
    first = series[0].rows[0]
    names = (first.model, first.model, first.fingerprint, first.dtype, "set")
    group = Group(*names, series, (Budget("step", 12.0),))
    return ReportData((dataclasses.replace(group, **changes),), notes)


def said(row, words, **changes):
    """The row with another output, token by token; ids are made from the words."""
    tokens = tuple(words.split(" "))
    ids = tuple(sum(map(ord, token)) for token in tokens)
    made = {"output_text": words, "output_tokens": tokens, "output_ids": ids, **changes}
    if "lcs" in changes:
        first, *rest = row.trace
        point = {"lcs": changes["lcs"], "as_in_code_lcs": row.as_in_code_lcs}
        made["trace"] = (*(dataclasses.replace(p, lcs=0.0) for p in (first, *rest[:-1])),)
        made["trace"] += (dataclasses.replace(row.trace[-1], **point),)
    return dataclasses.replace(row, **made)


def six(row):
    """Two methods with three results each."""
    wanted = said(row, "to be or not")
    row = dataclasses.replace(
        row,
        target_text="to be or not",
        target_tokens=wanted.output_tokens,
        target_ids=wanted.output_ids,
        exact=False,
        prompt_perplexity=None,
    )
    near = [
        said(row, "to be or not", lcs=1.0, exact=True, target_id="k10_sample0", seed=0),
        said(row, "to be xx not", lcs=0.75, target_id="k9_sample0", seed=1),
        said(row, "to yy xx not", lcs=0.5, target_id="k1_sample0", seed=2, prompt_perplexity=9.0),
    ]
    far = [
        said(row, "a b c d", lcs=0.0, target_id="k1_sample1", k=7),
        said(row, "a be c d", lcs=0.25, target_id="k1_sample2", k=7, prompt_perplexity=7.5),
        said(row, "needle be or d", lcs=0.5, target_id="k1_sample3", k=7),
    ]
    return Series("near", 5, tuple(near)), Series("far", 5, tuple(far))


def hostile(row):
    return dataclasses.replace(
        row,
        target_id=HOSTILE,
        target_text=HOSTILE,
        target_tokens=(HOSTILE, *row.target_tokens[1:]),
        prompt_text=HOSTILE,
        prompt_tokens=(HOSTILE, *row.prompt_tokens[1:]),
        output_text=HOSTILE,
        output_tokens=(HOSTILE, *row.output_tokens[1:]),
        stop_reason=HOSTILE,
        model=HOSTILE,
        settings={HOSTILE: HOSTILE, "\u2028": math.nan},
        lcs_matrix={HOSTILE: {"free_greedy": 1.0}},
        diagnostics={HOSTILE: tuple(1.0 for _ in row.prompt_ids)},
        versions={HOSTILE: HOSTILE},
        prompt_perplexity=math.inf,
    )


def hostile_page(path, row):
    results = loaded(Series(HOSTILE, 5, (hostile(row),)), notes=(HOSTILE + "\udcff",))
    figure = Figure(HOSTILE, HOSTILE, HOSTILE, SVG)
    table = ReportTable(HOSTILE, HOSTILE, HOSTILE, (HOSTILE,), ((HOSTILE,), (None,)))
    write_page(path, results, [figure, figure], [table])
    return path


class Reader(HTMLParser):
    """The elements of a page, and what stands in its style and its scripts."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.blocks = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] in ("style", "script") and data.strip():
            self.blocks.append(data)


def data_of(page: Path):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    return json.loads(found[1])


def test_no_text_becomes_markup_and_nothing_is_fetched(tmp_path, row):
    html = hostile_page(tmp_path / "page.html", row).read_text(encoding="utf-8")
    elements = Reader(html).elements
    assert [tag for tag, _ in elements].count("script") == 2
    assert [tag for tag, _ in elements].count("img") == 2
    for tag, attributes in elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        for name in ("src", "href", "action", "srcset"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
    assert "\x1b" not in html
    assert "\u2028" not in html
    assert "NaN" in html  # a setting that JSON cannot hold is shown as text


def test_policy_allows_only_what_stands_in_the_page(tmp_path, row):
    path = hostile_page(tmp_path / "page.html", row)
    reader = Reader(path.read_text(encoding="utf-8"))
    policy = next(a["content"] for _, a in reader.elements if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    style, _, script = reader.blocks
    for block in (style, script):
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", style + script)
    assert "innerHTML" not in script


def test_data_holds_every_row_once(tmp_path, row):
    series = six(row)
    write_page(tmp_path / "page.html", loaded(*series), [], [])
    data = data_of(tmp_path / "page.html")
    columns, rows = data["columns"], [row for each in series for row in each.rows]
    assert data["count"] == 6
    assert data["methods"] == ["near", "far"]
    assert len(data["settings"]) == len(data["environments"]) == 1
    assert columns["lcs"] == [row.lcs for row in rows]
    assert columns["members"] == ["", "1101", "1001", "0000", "0100", "0110"]
    for i, expected in enumerate(rows):
        tokens = columns["output"][i] or data["targets"][columns["target"][i]]["tokens"]
        pairs = [data["vocabulary"][token] for token in tokens]
        assert pairs == [
            list(pair) for pair in zip(expected.output_ids, expected.output_tokens, strict=True)
        ]
        prompt = [data["vocabulary"][token][1] for token in columns["prompt"][i]]
        assert (columns["promptText"][i] or "".join(prompt)) == expected.prompt_text
        steps = data["steps"][columns["trace"][i][0]]
        assert steps == [point.step for point in expected.trace]


def test_hostile_texts_survive_in_the_data(tmp_path, row):
    data = data_of(hostile_page(tmp_path / "page.html", row))
    assert data["columns"]["promptText"] == [HOSTILE]
    assert data["targets"][0]["text"] == HOSTILE
    assert data["columns"]["prompt_perplexity"] == [None]


def test_a_prompt_of_100_kilobytes_is_stored_once(tmp_path, row):
    text = HOSTILE * 1000
    long = dataclasses.replace(
        row, prompt_text=text, prompt_tokens=(text, *("",) * (len(row.prompt_ids) - 1))
    )
    write_page(tmp_path / "page.html", loaded(Series("m", 5, (long,))), [], [])
    data = data_of(tmp_path / "page.html")
    assert data["columns"]["promptText"] == [None]  # its tokens spell it
    assert data["vocabulary"][data["columns"]["prompt"][0][0]][1] == text
    assert (tmp_path / "page.html").stat().st_size < 4 * len(text)


def test_thinned_trace_keeps_ends_and_every_new_best():
    best_at = [7, 123, 124, 990]
    lcs = [sum(at <= i for at in best_at) / 4 * (i in best_at) for i in range(1000)]
    trace = [TracePoint(i, value, 1.0, None, None, 0.0, i, {}) for i, value in enumerate(lcs)]
    steps = [point.step for point in thin_trace(trace)]
    assert TRACE_POINTS - 8 <= len(steps) <= TRACE_POINTS
    assert steps == sorted(set(steps))
    assert {0, 999, *best_at} <= set(steps)
    assert thin_trace(trace[:9]) == trace[:9]
    rising = [dataclasses.replace(point, lcs=i / 999) for i, point in enumerate(trace)]
    steps = [point.step for point in thin_trace(rising)]
    assert (len(steps), steps[0], steps[-1]) == (TRACE_POINTS, 0, 999)


def test_summary_sets_the_two_measures_apart(tmp_path, row):
    series = six(dataclasses.replace(row, as_in_code_lcs=0.9))
    write_page(tmp_path / "page.html", loaded(*series), [], [])
    text = " ".join(re.sub(r"<[^>]*>", " ", (tmp_path / "page.html").read_text()).split())
    assert "near N = 5 33 % exact 1 of 3 results mean honest LCS 0.750" in text
    assert "as in code not comparable 0.900" in text
    assert "far N = 5 0 % exact 0 of 3 results mean honest LCS 0.250" in text


def test_page_without_results(tmp_path):
    write_page(tmp_path / "page.html", ReportData((), ("a note",)), [], [])
    assert "No result rows" in (tmp_path / "page.html").read_text()


# ---- In a browser


def test_tables_mark_the_wrong_tokens(tmp_path):
    text = ModelText([("right<b>", False), (" wrong", True)])
    table = ReportTable("prompts", "Prompts", "One.", ("output",), ((text,),))
    write_page(tmp_path / "page.html", ReportData((), ()), [], [table])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'right&lt;b&gt;<mark class="miss">␣wrong</mark></td>' in page


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    browser = Chromium(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium):
    """The browser; no page may complain, or ask the network for anything."""
    chromium.emulate()
    yield chromium
    chromium.evaluate("0")
    assert chromium.problems == []


@pytest.fixture
def page(tmp_path, row):
    path = tmp_path / "page.html"
    write_page(path, loaded(*six(row)), [Figure("f", "A figure", "A caption", SVG)], [])
    return path


def column(browser, key):
    return browser.evaluate(
        f"(() => {{const at = [...document.querySelectorAll('#table > thead th')]"
        f".findIndex((cell) => cell.dataset.key === '{key}');"
        "return [...document.querySelectorAll('tr.result')].map((r) => r.cells[at].innerText)})()"
    )


def click(browser, selector):
    browser.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


def sort(browser, key):
    click(browser, f'[data-key="{key}"] button')
    return browser.evaluate(f"document.querySelector('[data-key=\"{key}\"]').ariaSort")


def choose(browser, name, value):
    browser.evaluate(
        f"(() => {{const control = document.querySelector('[name={name}]');"
        f"control.value = {json.dumps(value)};"
        "control.dispatchEvent(new Event('input', {bubbles: true}))})()"
    )


def text_of(browser, selector):
    return browser.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")


@needs_chromium
def test_sorting_by_number_and_by_text(browser, page):
    browser.open(page)
    assert sort(browser, "lcs") == "descending"
    assert column(browser, "lcs") == ["1.00", "0.75", "0.50", "0.50", "0.25", "0.00"]
    assert sort(browser, "lcs") == "ascending"
    assert column(browser, "lcs") == ["0.00", "0.25", "0.50", "0.50", "0.75", "1.00"]
    assert sort(browser, "id") == "ascending"
    ids = [f"k1_sample{i}" for i in range(4)] + ["k9_sample0", "k10_sample0"]
    assert column(browser, "id") == ids
    assert sort(browser, "id") == "descending"
    assert column(browser, "id") == ids[::-1]
    for _ in range(2):  # rows without a value come last either way
        sort(browser, "perplexity")
        assert column(browser, "perplexity")[2:] == [format_cell(None)] * 4


@needs_chromium
def test_filters_and_the_address_that_keeps_them(browser, page):
    browser.open(page)
    choose(browser, "q", "NEEDLE")
    assert column(browser, "id") == ["k1_sample3"]
    assert text_of(browser, "#count") == "1 to 1 of 1 results (6 in all)"
    choose(browser, "q", "")
    choose(browser, "method", "far")
    assert len(column(browser, "id")) == 3
    choose(browser, "k", "7")
    sort(browser, "lcs")
    assert column(browser, "lcs") == ["0.50", "0.25", "0.00"]
    address = browser.evaluate("location.hash")
    browser.open(page, address)
    assert column(browser, "lcs") == ["0.50", "0.25", "0.00"]
    assert browser.evaluate("document.querySelector('[name=method]').value") == "far"
    browser.evaluate("location.hash = '#exact=yes'")
    browser.evaluate("new Promise((done) => setTimeout(done, 50))")
    assert column(browser, "id") == ["k10_sample0"]
    choose(browser, "exact", "no")
    assert len(column(browser, "id")) == 5
    choose(browser, "q", "no such text")
    assert text_of(browser, "#count") == "0 results (6 in all)"


@needs_chromium
def test_opening_a_row_with_the_keyboard(browser, page, row):
    browser.open(page)
    browser.evaluate("document.querySelectorAll('button.open')[1].focus()")
    browser.press("Enter", 13, "\r")
    assert browser.evaluate("document.activeElement.ariaExpanded") == "true"
    assert browser.evaluate("document.querySelectorAll('.detail').length") == 1
    details = text_of(browser, ".detail")
    for expected in ("Copy prompt", "teacher forced", "python -m dlmi verify", "tau0", row.model):
        assert expected in details
    tokens = browser.evaluate(
        "[...document.querySelectorAll('.detail .chip')].map((c) => [c.innerText, c.title])"
    )
    assert tokens[0] == ["to", f"token {ord('t') + ord('o')}"]
    assert [text for text, _ in tokens[4:9]] == list(row.prompt_tokens)
    marked = browser.evaluate(
        "[...document.querySelectorAll('.detail mark')].map((m) => m.innerText)"
    )
    assert marked == ["xx"]
    underline = "getComputedStyle(document.querySelector('.result .miss')).textDecorationLine"
    assert browser.evaluate(underline) == "underline"
    assert browser.evaluate("document.querySelectorAll('.detail .value.tau').length") == 5
    paths = browser.evaluate(
        "[...document.querySelectorAll('.chart path')].map((p) => p.getBBox().width)"
    )
    assert len(paths) == 3
    assert min(paths) > 50
    browser.open(page, browser.evaluate("location.hash"))
    assert browser.evaluate("document.querySelectorAll('.detail').length") == 1
    browser.evaluate("document.querySelectorAll('button.open')[1].focus()")
    browser.press("Enter", 13, "\r")
    assert browser.evaluate("document.querySelectorAll('.detail').length") == 0


@needs_chromium
def test_copying_without_a_clipboard(browser, page, row):
    browser.open(page)
    click(browser, "button.open")
    browser.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    browser.evaluate(
        "document.execCommand = () => {window.copied = getSelection().toString() || "
        "document.activeElement.value; return true}"
    )
    click(browser, ".copy button")
    assert browser.evaluate("window.copied") == row.prompt_text
    assert text_of(browser, ".copy output") == "copied"


@needs_chromium
def test_hostile_texts_are_shown_and_not_run(browser, tmp_path, row):
    browser.open(hostile_page(tmp_path / "page.html", row))
    click(browser, "button.open")
    choose(browser, "method", HOSTILE)
    assert browser.evaluate("window.hit") is None
    assert column(browser, "id") == [HOSTILE_SHOWN]
    assert column(browser, "target") == [HOSTILE_SHOWN]
    shown = browser.evaluate("document.querySelector('.details').textContent")
    assert shown.count(HOSTILE_SHOWN) >= 5
    assert text_of(browser, "h3").startswith(HOSTILE_SHOWN)
    assert browser.evaluate("document.querySelectorAll('script').length") == 2
    assert browser.evaluate("document.querySelectorAll('img').length") == 2


@needs_chromium
def test_light_and_dark(browser, page):
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.open(page)
    light = browser.evaluate(ground)
    assert text_of(browser, "#theme") == "Dark"
    click(browser, "#theme")
    dark = browser.evaluate(ground)
    assert dark != light
    click(browser, "#theme")
    assert browser.evaluate(ground) == light
    browser.emulate(scheme="dark")
    browser.open(page)
    assert browser.evaluate(ground) == dark
    assert text_of(browser, "#theme") == "Light"
    ink = "getComputedStyle(document.body).color"
    on_screen = browser.evaluate(ink)
    browser.emulate(scheme="dark", media="print")
    assert browser.evaluate(ink) != on_screen
    assert browser.evaluate(ground) == "rgb(255, 255, 255)"
    paper = "getComputedStyle(document.querySelector('.paper')).backgroundColor"
    assert browser.evaluate(paper) == "rgb(255, 255, 255)"
    assert browser.evaluate("document.querySelector('.paper img').naturalWidth") > 0


@needs_chromium
def test_a_phone_shows_the_page_without_scrolling_sideways(browser, page):
    browser.emulate(390, 844)
    browser.open(page)
    click(browser, "button.open")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390


@needs_chromium
def test_ten_thousand_rows(browser, tmp_path, row):
    near, far = six(row)
    trace = tuple(dataclasses.replace(row.trace[0], step=i, lcs=i / 99) for i in range(99))
    rows = [
        dataclasses.replace(near.rows[i % 3], trace=trace, seconds=i / 7, seed=i)
        for i in range(9_997)
    ]
    path = tmp_path / "page.html"
    write_page(path, loaded(Series("near", 5, tuple(rows)), far), [], [])
    browser.open(path)
    assert path.stat().st_size < 10e6
    assert text_of(browser, "#count") == "1 to 100 of 10,000 results"
    timed = (
        "(() => {const start = performance.now(); %s; document.body.offsetHeight;"
        "return performance.now() - start})()"
    )
    for key in ("seconds", "id", "output"):
        assert (
            browser.evaluate(timed % f"document.querySelector('[data-key={key}] button').click()")
            < 1000
        )
    search = "control = document.querySelector('[name=q]'); control.value = 'needle';"
    search += "control.dispatchEvent(new Event('input', {bubbles: true}))"
    assert browser.evaluate(timed % search) < 1000
    assert column(browser, "id") == ["k1_sample3"]
    choose(browser, "q", "")
    click(browser, "#pager button:last-child")
    assert text_of(browser, "#count") == "101 to 200 of 10,000 results"
