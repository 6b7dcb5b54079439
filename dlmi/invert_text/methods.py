"""Methods by name, with settings for a budget of minutes, and searches that go on from a prompt.

The defaults of the methods are the published ones, which are too slow for minutes: here steps are
cheap, and prompts are decoded after a few of them. With few candidates GCG gets stuck if it keeps
its prompt unless one is better, so it takes the best candidate even if that is worse.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dlmi import methods
from dlmi.errors import InputError
from dlmi.jsonl import build
from dlmi.methods import ADC, DLMI, GBDA, GCG
from dlmi.methods.base import Method, Search, settings_of
from dlmi.methods.slot import Slot

_SETTINGS: Mapping[str, Method[Any]] = {
    "ADC": ADC(restarts=1, momentum=0.97, ema_rate=0.05, norm_gradient_scale=0.85),
    "DLMI": DLMI(tau0=1.0, num_samples=1, lr=0.3),
    "GBDA": GBDA(num_samples=1, lr=0.3),
    "GCG": GCG(search_width=64, topk=64, buffer_size=0),
}
_EVAL_EVERY = {"ADC": 8, "SwapSearch": None}  # others: 4
METHOD_NAMES = sorted({*methods.__all__} - {"Refined"})  # it wraps another method


def named_method(
    method: str | Method[Any], options: Mapping[str, Any]
) -> tuple[Method[Any], int | None]:
    """A method, and after how many steps to decode; `options` change a named one."""
    if isinstance(method, Method):
        if options:
            raise InputError(
                "Expected `options` only with the name of a method, but got an object as "
                f"`method`. Make it a {type(method).__name__} with these settings."
            )
        return method, None
    if method not in METHOD_NAMES:
        names = ", ".join(METHOD_NAMES)
        raise InputError(f"Expected `method` to be one of {names}, but got {method!r}.")
    small: Method[Any] = _SETTINGS.get(method) or getattr(methods, method)()
    settings = settings_of(small)
    if unknown := sorted(options.keys() - settings.keys()):
        raise InputError(
            f"Expected `options` to be options of {method} ({', '.join(sorted(settings))}), but "
            f"got {unknown[0]!r}."
        )
    try:
        return build(type(small), {**settings, **options}), _EVAL_EVERY.get(method, 4)
    except InputError as error:
        line = str(error).removesuffix(".").replace("model.method.", "")
        raise InputError(f"Expected `options` to fit {method}: {line}.") from error


def starting_from(method: Method[Any], found: Mapping[str, Sequence[int]]) -> Method[Any]:
    """The same search, from prompts of any length, by target id; a relaxation starts anew.

    A shorter prompt is extended by the beginning of the method's own starts. From a longer one,
    tokens are deleted at each place.
    """
    if not isinstance(method, Search):
        return method
    kind: type[Search[Any]] = type(method)

    def starts(self: Search[Any], slot: Slot) -> Tensor:
        own = kind.starts(self, slot)  # (C, N)
        if slot.target.id not in found:
            return own
        prompt_ids = torch.tensor(found[slot.target.id])
        surplus = len(prompt_ids) - slot.length
        if surplus <= 0:
            own[:, -surplus:] = prompt_ids
            return own
        places = range(slot.length + 1)
        return torch.stack([torch.cat([prompt_ids[:i], prompt_ids[i + surplus :]]) for i in places])

    # With the same name, which result rows record.
    made: Search[Any] = type(kind.__name__, (kind,), {"starts": starts})(**vars(method))
    return made
