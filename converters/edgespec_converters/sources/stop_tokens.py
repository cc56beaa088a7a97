"""Which ids end an answer. Files name one, models use several, and the template shows the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

# Always an end when the vocabulary has them as control tokens.
_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<eos>", "<|EOT|>", "<｜end▁of▁sentence｜>")
# An end when the template writes them after a turn.
_TURN_ENDS = (
    "<|im_end|>",
    "<end_of_turn>",
    "<|end|>",
    "<|eot_id|>",
    "<|end_of_turn|>",
    "<|endofturn|>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
)


def is_turn_end(text: str) -> bool:
    """Whether a token's spelling is known to end a turn, whatever its type in the file."""
    return text in _TURN_ENDS


def find_stop_ids(
    named: Iterable[int | None], ids: Mapping[str, int], control: Collection[int], chat_template: str | None
) -> tuple[int, ...]:
    """Every end-of-text and end-of-turn id, once each: those the file names come first, the first of them is its `eos_token`.

    `ids`: spelling → id. `control`: ids of control tokens.
    """
    found = [i for i in named if i is not None]
    found += [ids[text] for text in _TEXT_ENDS if ids.get(text) in control]
    found += [ids[text] for text in _TURN_ENDS if chat_template and text in ids and text in chat_template]
    return tuple(dict.fromkeys(found))
