from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from edgespec.core.device import UnitProfile
from edgespec_device_profiles import report
from edgespec_device_profiles.measured import Machine, Measured
from edgespec_device_profiles.svg import LEFT, MARK_ROOM, TOP, Axis, Line, chart, ticks
from edgespec_device_profiles.verdict import one_for_all, verdicts
from tests.helpers.browser import browser, opened
from tests.helpers.timed import example

HOSTILE = '<script>alert("x")</script>&'
VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Checks that elements nest, and collects what the page refers to and what it says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def variants() -> dict[str, Measured]:
    empty = example(
        units={}, kinds={}, sustained=(), complete=False, other_ms=None, prediction_error=None, not_measured={"all": "interrupted"}
    )
    hostile = example(machine=Machine(name="x", processor=HOSTILE, load_before=99.0), policy=HOSTILE, not_measured={HOSTILE: HOSTILE})
    one = example(kinds={"code": example().kinds["code"]}, sustained=example().sustained[:1], hot_samples=3)
    return {"whole": example(), "empty": empty, "hostile": hostile, "one": one}


@pytest.mark.parametrize("name", variants())
def test_the_page_stands_alone(name: str) -> None:
    text = report.page(variants()[name])
    page = Reader(text)
    assert page.links == ["data:,"], "an empty icon, so that no browser asks for one"
    assert not page.tags & {"script", "img", "iframe", "object", "embed"}
    assert "@import" not in text and set(re.findall(r"url\(([^)]*)\)", text)) <= {f"#{i}" for i in re.findall(r'id="(clip-[^"]*)"', text)}
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)  # each chart is well-formed on its own


def test_the_verdict_stands_on_top_in_words() -> None:
    said = Reader(report.page(example())).text
    overall, (code, chat) = one_for_all(example()), verdicts(example())
    assert overall is not None
    first = said.index(f"Draft {overall.draft_tokens} tokens if one length must serve all: {overall.speed_up:.2f}x expected")
    assert (
        first
        < said.index(code.headline)
        < said.index("2.00x measured with policy adaptive on 6 answers")
        < said.index("Which draft length is best?")
    )
    assert said.index(chat.headline) < said.index("Which draft length is best?")


def test_an_expectation_that_no_answer_met_is_called_unproven() -> None:
    slower = tuple(replace(answer, tok_s=90.0) if answer.mode == "speculative" else answer for answer in example().sustained)
    met, unmet = (verdicts(m)[0].finding("adaptive") for m in (example(), example(sustained=slower)))
    assert met.good is True and "unproven" not in met.text
    assert unmet.good is None and "0.90x measured" in unmet.head and "unproven" in unmet.text
    chat = verdicts(example())[1].finding("adaptive")
    assert chat.good is False and "unproven" not in chat.text


def test_what_is_missing_is_said() -> None:
    said = Reader(report.page(variants()["empty"])).text
    assert "No draft length can be recommended" in said and "The run is not complete" not in said.split("Which draft length")[1]
    assert "interrupted" in said.split("Not measured")[-1]
    assert "3 samples were taken while the device was hot" in Reader(report.page(variants()["one"])).text
    assert "The machine was busy" in Reader(report.page(variants()["hostile"])).text


def test_names_are_text_never_markup() -> None:
    text = report.page(variants()["hostile"])
    assert "<script" not in text
    assert HOSTILE in Reader(text).text


def test_numbers_are_in_tables_too() -> None:
    said = Reader(report.page(example())).text
    for figure in ("13.00 (13.00)", "26.00 (26.00)", "within 10%", "20.0 GB/s", "measured on 2026-01-02 with tiny on toy"):
        assert figure in said


def test_two_profiles_side_by_side() -> None:
    faster = example(units={"cpu": UnitProfile(bandwidth_gbs=40.0, forward_ms={1: {64: 5.0}, 2: {64: 5.5}})})
    differences = report.differences(example(), faster)
    assert ("memory bandwidth, GB/s", 20.0, 40.0) in differences
    assert ("pass of 1 rows at context 64, ms", 10.0, 5.0) in differences
    assert not any("512" in what for what, _, _ in differences), "only what both have"
    said = Reader(report.comparison(example(), faster)).text
    assert "Expected speed-up on code" in said and "0.50" in said


def test_charts_keep_data_inside_the_frame() -> None:
    points = [(0.0, -3.0), (5.0, 10.0), (9.0, 1e6)]
    svg = ElementTree.fromstring(chart("t", Axis(label="x"), Axis(label="y"), [Line(name="a", points=points)]))
    frame = svg.find(".//{*}clipPath/{*}rect")
    assert frame is not None
    left, top, width, height = (float(frame.attrib[key]) for key in ("x", "y", "width", "height"))
    assert (left, top) == (LEFT - MARK_ROOM, TOP - MARK_ROOM), "marks on the edge are seen whole"
    marks = svg.findall("{*}g[@clip-path]//{*}circle")
    assert len(marks) == 3
    for mark in marks:
        assert left <= float(mark.attrib["cx"]) <= left + width and top <= float(mark.attrib["cy"]) <= top + height


def test_a_chart_of_nothing_says_so() -> None:
    assert "Nothing measured" in chart("t", Axis(label="x"), Axis(label="y"), [Line(name="guide", points=[(0, 1)], guide=True)])


def test_charts_of_one_point_or_one_value() -> None:
    for log in (False, True):
        ElementTree.fromstring(chart("t", Axis(label="x", log=log), Axis(label="y", log=log), [Line(name="a", points=[(3.0, 3.0)])]))


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0, 10, False, [0, 2, 4, 6, 8, 10]),
        (0.9, 1.5, False, [0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5]),
        (-1, 1, False, [-1, -0.5, 0, 0.5, 1]),
        (3, 300, True, [5, 10, 20, 50, 100, 200]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, log: bool, expected: list[float]) -> None:
    assert ticks(low, high, log=log) == pytest.approx(expected)


@pytest.mark.skipif(browser() is None, reason="no Chromium on this machine: the report was not opened in a browser")
@pytest.mark.parametrize("name", variants())
def test_a_browser_opens_it_without_a_word_on_its_console(name: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(report.page(variants()[name]), encoding="utf-8")
    dom, console = opened(page)
    assert console == []
    assert dom.count("<svg") == report.page(variants()[name]).count("<svg")
    assert dom.rstrip().endswith("</html>")


@pytest.mark.skipif(browser() is None, reason="no Chromium on this machine: the console check was not checked")
def test_the_browser_check_hears_complaints(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<script>console.error('heard')</script>", encoding="utf-8")
    assert any("heard" in line for line in opened(page)[1])
