from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.orchestrator.text import Detokenizer, StopStrings, Tokenizer
from tests.helpers.bytetok import END, bytetok, spmtok

TOKENIZERS = {"bytes": bytetok(), "spm with a space in front": spmtok(), "spm without": spmtok(add_space_prefix=False)}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def run_stops(stops: list[str], chunks: list[str]) -> tuple[str, bool]:
    scanner = StopStrings(stops)
    text = ""
    for chunk in chunks:
        piece, stopped = scanner.push(chunk)
        text += piece
        if stopped:
            assert scanner.push("more") == ("", True)
            assert scanner.flush() == ""
            return text, True
    return text + scanner.flush(), False


def test_esb_05_half_a_character_waits() -> None:
    assert streamed(TOKENIZERS["bytes"], [0xF0, 0x9F, 0x91, 0x8D]) == ["", "", "", "👍", ""]


def test_esb_05_every_split_point() -> None:
    text = "a世é👍🏽"
    raw = text.encode()
    for cut in range(len(raw) + 1):
        words = {0: raw[:cut], 1: raw[cut:]}
        tokenizer = Tokenizer(_Words(words), vocab_size=2)
        first, second, rest = streamed(tokenizer, [0, 1])
        assert first + second + rest == text
        assert "\ufffd" not in first + second
        assert first == raw[:cut].decode(errors="ignore")


class _Words:
    leading_space = False
    control_ids: frozenset[int] = frozenset()

    def __init__(self, words: dict[int, bytes]) -> None:
        self.pieces = list(words.values())

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        raise NotImplementedError


def test_an_invalid_byte_shows_as_soon_as_nothing_can_save_it() -> None:
    assert streamed(TOKENIZERS["bytes"], [0xF0, 0x41]) == ["", "\ufffdA", ""]
    assert streamed(TOKENIZERS["bytes"], [0xFF]) == ["\ufffd", ""]
    assert streamed(TOKENIZERS["bytes"], [0xE4, 0xB8]) == ["", "", "\ufffd"]


def test_control_tokens_are_invisible_even_inside_a_character() -> None:
    assert streamed(TOKENIZERS["bytes"], [0x41, END, 0xC3, END, 0xA9]) == ["A", "", "", "", "é", ""]


def test_esb_43_sentencepiece_first_space() -> None:
    spaced, plain = TOKENIZERS["spm with a space in front"], TOKENIZERS["spm without"]
    ids = [spaced.encode("x b")[0], 267 + 1, 267 + 2]  # "▁", "▁b", "▁c"
    assert [spaced.token_bytes(i) for i in ids] == [b" ", b" b", b" c"]
    assert "".join(streamed(spaced, ids)) == spaced.decode(ids) == " b c"
    assert "".join(streamed(plain, ids)) == plain.decode(ids) == "  b c"


def test_esb_43_a_byte_level_answer_keeps_its_first_space() -> None:
    assert "".join(streamed(TOKENIZERS["bytes"], list(b" hi"))) == " hi"


@every_tokenizer
@given(data=st.data())
def test_stream_joins_to_the_whole_for_any_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("size", range(1, 8))
def test_esb_15_a_stop_string_over_several_tokens(size: int) -> None:
    reply = "alpha beta gamma delta"
    assert run_stops(["ta gam"], [reply[i : i + size] for i in range(0, len(reply), size)]) == ("alpha be", True)


def test_esb_15_no_prefix_of_the_stop_is_ever_sent_and_a_near_miss_is_delivered() -> None:
    scanner = StopStrings(["ta gam"])
    sent = [scanner.push(character)[0] for character in "alpha beta ga"]
    assert "".join(sent) == "alpha be"
    assert scanner.push("X") == ("ta gaX", False)
    assert scanner.flush() == ""
    assert run_stops(["ta gam"], ["alpha beta ga"]) == ("alpha beta ga", False)


def test_a_stop_inside_another_and_several_at_once() -> None:
    assert run_stops(["abcd", "bc"], ["abcd"]) == ("a", True)
    assert run_stops(["bc", "abc"], ["xabc"]) == ("x", True)
    assert run_stops([], ["anything"]) == ("anything", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def _expected(stops: list[str], text: str) -> tuple[str, bool]:
    """The obvious way: the shortest prefix that ends in a stop string, less the longest one that it ends in."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    chunks=st.lists(st.text("abc", max_size=6), max_size=10),
)
def test_stop_strings_equal_the_obvious_search_for_any_chunks(stops: list[str], chunks: list[str]) -> None:
    assert run_stops(stops, chunks) == _expected(stops, "".join(chunks))


@given(stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), text=st.text("abc", max_size=30))
def test_what_is_held_back_is_the_longest_possible_beginning_of_a_stop(stops: list[str], text: str) -> None:
    scanner = StopStrings(stops)
    sent, stopped = scanner.push(text)
    if not stopped:
        held = text[len(sent) :]
        tails = [text[i:] for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in stops)]
        assert held == max(tails, key=len, default="")


def test_scanning_steps_grow_with_the_text_not_with_the_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    scanner = StopStrings(["a" * 500 + "b"])
    fallbacks = 0

    class Counted(list[int]):
        def __getitem__(self, i):  # type: ignore[no-untyped-def]
            nonlocal fallbacks
            fallbacks += 1
            return super().__getitem__(i)

    monkeypatch.setattr(scanner, "_fail", Counted(scanner._fail))
    for _ in range(5000):
        scanner.push("a")
    assert fallbacks <= 5000
