"""ESB-16: what a kept cache holds is compared token by token with the next prompt."""

from __future__ import annotations

from tests.helpers.toys import toy_lm
from tests.helpers.toytext import toy_runtime


def test_esb_16_prompts_of_one_length_that_differ_in_one_place() -> None:
    session = toy_runtime(toy_lm(7), draft="none").session()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    session.generate(prompt, max_tokens=8)
    for place in range(len(prompt)):
        other = [*prompt[:place], 9, *prompt[place + 1 :]]
        fresh = toy_runtime(toy_lm(7), draft="none").session().generate(other, max_tokens=8)
        assert session.generate(other, max_tokens=8).token_ids == fresh.token_ids
        session.generate(prompt, max_tokens=1)
