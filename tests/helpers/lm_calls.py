"""What an LM is really given: calls of its forward pass, and the tokens in them."""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

from dlmi.lm.frozen_lm import FrozenLM


@dataclass
class Calls:
    """Calls of an LM.

    Attributes:
        tokens: Of each call, rows times positions, without padding that a mask tells of.
        backward: The same of those calls whose logits a gradient came back to.
    """

    tokens: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)


@contextlib.contextmanager
def counted_calls(lm: FrozenLM) -> Iterator[Calls]:
    """Count what goes through the LM within."""
    calls = Calls()
    signature = inspect.signature(type(lm.model).forward)

    def note(module, args, kwargs, output):
        given = signature.bind(module, *args, **kwargs).arguments
        inputs = given.get("inputs_embeds")
        inputs = given["input_ids"] if inputs is None else inputs
        mask = given.get("attention_mask")
        count = inputs.shape[0] * inputs.shape[1]
        if mask is not None:
            count = int(mask[:, -inputs.shape[1] :].sum())
        calls.tokens.append(count)
        if output.logits.requires_grad:
            output.logits.register_hook(lambda _: calls.backward.append(count))

    handle = lm.model.register_forward_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()
