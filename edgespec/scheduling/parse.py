"""Policies by the names that people type."""

from __future__ import annotations

from edgespec.core.policy import Policy
from edgespec.scheduling.adaptive import AdaptivePolicy
from edgespec.scheduling.entropy import EntropyPolicy
from edgespec.scheduling.fixed import FixedPolicy
from edgespec.scheduling.governor import Governor
from edgespec.scheduling.window import WindowPolicy

DEFAULT = "adaptive"
GOVERNED = "+governor"
KNOWN = f"fixed:N (N >= 0), window, entropy, adaptive, each also with {GOVERNED}"


def parse_policy(text: str) -> Policy:
    """A fresh policy, e.g. of "fixed:4"; "adaptive+governor" puts the governor around it. ValueError names what is known."""
    if text.strip().endswith(GOVERNED):
        return Governor(parse_policy(text.strip().removesuffix(GOVERNED)))
    name, _, argument = text.strip().partition(":")
    if name == "fixed" and argument.isascii() and argument.isdigit():
        return FixedPolicy(int(argument))
    if name == "window" and not argument:
        return WindowPolicy()
    if name == "entropy" and not argument:
        return EntropyPolicy()
    if name == "adaptive" and not argument:
        return AdaptivePolicy()
    raise ValueError(f"unknown policy {text!r}; known policies: {KNOWN}")


def governed(policy: Policy) -> Policy:
    """The policy under the eyes of battery and heat. A fixed length was asked for as it is, and stays."""
    return policy if isinstance(policy, FixedPolicy | Governor) else Governor(policy)
