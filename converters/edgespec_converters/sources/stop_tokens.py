"""Which ids end an answer. Files name one, models use several, and the chat template shows the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from edgespec.orchestrator.text import ChatTemplate, TemplateError

# Always an end when the vocabulary has them as control tokens.
_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<eos>", "<|EOT|>", "<｜end▁of▁sentence｜>")
# An end when the template speaks of them.
_TURN_ENDS = ("<|im_end|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>")
_PROBE = "Fine."


def find_stop_ids(
    named: Iterable[int | None],
    *,
    added: Mapping[str, int],
    control: Collection[int],
    chat_template: str | None,
    bos_token: str = "",
    eos_token: str = "",
) -> tuple[int, ...]:
    """Every end-of-text and end-of-turn id, once each; those that the files name come first.

    `added`: spelling → id of tokens that stand outside ordinary text, of which `control` are marked as control tokens.
    """
    found = [i for i in named if i is not None]
    found += [added[text] for text in _TEXT_ENDS if added.get(text) in control]
    if chat_template is not None:
        found += [added[text] for text in _TURN_ENDS if text in added and text in chat_template]
        found += _after_a_turn(added, ChatTemplate(chat_template, bos_token=bos_token, eos_token=eos_token))
    return tuple(dict.fromkeys(found))


def _after_a_turn(added: Mapping[str, int], template: ChatTemplate) -> list[int]:
    """The token that the template itself writes after an assistant's turn, whatever its name."""
    try:
        text = template.render([{"role": "user", "content": "Hi."}, {"role": "assistant", "content": _PROBE}], add_generation_prompt=False)
    except TemplateError:
        return []  # it will say why when it is used
    _, found, rest = text.rpartition(_PROBE)
    end = max((spelling for spelling in added if spelling and rest.lstrip().startswith(spelling)), key=len, default=None)
    return [added[end]] if found and end is not None else []
