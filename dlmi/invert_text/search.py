"""`invert`: the prompt of a text in one call.

Prompts of growing length are tried within one budget. Each length is a run over all texts that are
not solved, each from several starts. A search goes on from the best prompt of the length before.
The starts of a text are targets of one group: the first exact one ends the others. Then tokens are
deleted from exact prompts, as long as they stay exact.
"""

import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, overload

from dlmi.errors import InputError, check_at_least_one, check_positive
from dlmi.invert_text.methods import named_method, starting_from
from dlmi.invert_text.progress import OnProgress, Watch
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.lm.loading import load_lm
from dlmi.lm.pass_dtype import PassDType
from dlmi.lm.placement import DType, default_device
from dlmi.methods.base import Method, Search
from dlmi.rows import Inversion
from dlmi.run.budget import NO_STEP_LIMIT
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter
from dlmi.run.quiet import run_quietly
from dlmi.scoring.evaluation import evaluate_alone
from dlmi.targets.files import texts_to_targets
from dlmi.targets.target import Target
from dlmi.targets.template import Messages, find_template
from dlmi.text import counted
from dlmi.tokens.forbidden import ForbiddenTokens
from dlmi.tokens.token_sets import AllowedTokens, check_allowed_tokens

AUTO_LENGTHS: tuple[int, ...] = (4, 8, 16, 32)
_DEFAULT_SECONDS = 120.0
_SHORTEN_SHARE = 0.2  # of what is left of the budget, to make exact prompts shorter
_SHORTEN_STEPS = 8  # after each deleted token
_MOST_COPIES = 3  # of the text, as a trivial prompt
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _own_names() -> Iterator[None]:
    """Replace the names of `fit`'s options in errors by the arguments of `invert`."""
    try:
        yield
    except InputError as error:
        line = re.sub(r"`data\.targets\.texts(?:\[0\])?", "`text", str(error))
        raise InputError(re.sub(r"`(?:model\.method|model|data)\.(?=\w)", "`", line)) from error


@overload
def invert(lm: Any, text: str, **options: Any) -> Inversion: ...


@overload
def invert(lm: Any, text: Sequence[str], **options: Any) -> list[Inversion]: ...


@_own_names()  # type: ignore[misc]  # the overloads do not repeat the options
def invert(
    lm: FrozenLM | str | tuple[Any, Any],
    text: str | Sequence[str],
    *,
    prompt_length: int | Literal["auto"] = "auto",
    method: str | Method[Any] = "SwapSearch",
    options: dict[str, Any] | None = None,
    seconds: float | None = None,
    steps: int | None = None,
    restarts: int = 1,
    seed: int = 0,
    allowed_tokens: AllowedTokens = "round_trip",
    forbid_target_tokens: ForbiddenTokens = "stems",
    fluency: float = 0.0,
    prompt_bos: bool = False,
    template: str | Messages | None = None,
    chat: bool = False,
    dtype: DType = "auto",
    pass_dtype: PassDType | None = "auto",
    on_progress: OnProgress | None = None,
) -> Inversion | list[Inversion]:
    """Find the prompt after which a language model greedily says a text.

    Writes and prints nothing; messages go to the logger `dlmi.invert_text` at level INFO. Ctrl-C
    ends the search and returns the best so far.

    Args:
        lm: A FrozenLM, a name for `load_lm`, or a pair of a causal LM of transformers and its
            tokenizer; the LM is frozen (`eval`, no gradients for its weights) and stays so.
        text: What it is to say, or several texts, which are inverted together.
        prompt_length: Tokens of the prompt, or `auto`: 4, then 8, 16 and 32 until a text is found,
            each with an equal share of the budget and, for a search, from the best prompt so far.
            A fifth of what is left then goes into shorter prompts.
        method: Name of a method, with settings for small budgets; in Python also a method.
        options: Settings of the named method to change: '{"width": 64}'.
        seconds: Budget of time, for all texts together. Default: 120, unless `steps` is given.
        steps: Budget of steps, for each start of each text.
        restarts: Starts of each text at the same time; the first exact one ends the others.
        seed: Of the noise.
        allowed_tokens: Tokens of prompts, as in `fit`'s `model`. With the default a prompt is the
            same after it is pasted as text.
        forbid_target_tokens: What a prompt may not hold: `none`, the text's `ids`, its `words`, or
            its words and near-copies of them (`stems`).
        fluency: Weight of a penalty on prompts that the LM finds unlikely; 0 for none.
        prompt_bos: Put BoS before the prompt.
        template: Text around the prompt, with {slot} where its tokens go: "Q:{slot} A:"; or a chat,
            as a list of messages: '[{"role": "user", "content": "Joke {slot}"}]'. On the command
            line also a file, .json or .yaml, with either.
        chat: Make the template the user's message of a chat.
        dtype: Of an LM that is given by name, as in `fit`'s `data`.
        pass_dtype: In which the LM searches; `auto` is the fastest, measured once for a machine.
            Results are measured in the LM's own dtype.
        on_progress: Called after each step and each evaluation, for each text in progress.

    Returns:
        The row of the best start, as `fit` writes it, but without the LCS matrix and with the
        seconds, steps and token-passes since the search began; for several texts a list of rows.
        `stop_reason` is `interrupted` after Ctrl-C.

    Raises:
        InputError: If an argument is invalid.
    """
    texts = [text] if isinstance(text, str) else list(text)
    if not texts or not all(isinstance(each, str) for each in texts):
        raise InputError("Expected `text` to be a text, or a list of at least one text.")
    lengths = AUTO_LENGTHS if prompt_length == "auto" else (prompt_length,)
    check_at_least_one("model", prompt_length=lengths[0], steps=steps, restarts=restarts)
    if seconds is None:
        seconds = _DEFAULT_SECONDS if steps is None else math.inf
    check_positive("model", seconds=seconds)
    check_allowed_tokens(allowed_tokens)
    around = find_template(template, chat, "`template`")
    if around is not None and around.fields:
        raise InputError(
            f"Expected `template` to hold `{{slot}}` and fixed text, but {{{around.fields[0]}}}"
            " is a field. `fit` fills fields, from a targets file."
        )
    asked, eval_every = named_method(method, options or {})
    lm = _as_frozen_lm(lm, dtype)
    targets = texts_to_targets(lm, texts, around)
    for target in targets:
        _check_known(lm, target)
        _log.info(_about_copying(lm, target))
    if lm.max_positions is not None:  # those that fit; the shortest in any case
        room = lm.max_positions - max(target.longest_row(0) for target in targets)
        lengths = tuple(n for n in lengths if n < room) or lengths[:1]
    watch = Watch(on_progress, seconds)

    def run(starts: Sequence[Target], length: int, steps: int, seconds: float) -> None:
        found = {start_id: row.prompt_ids for start_id, row in watch.latest.items()}
        inverter = Inverter(
            starting_from(asked, found),
            prompt_length=length,
            steps=steps,
            eval_every=eval_every,
            prompt_bos=prompt_bos,
            allowed_tokens=allowed_tokens,
            forbid_target_tokens=forbid_target_tokens,
            fluency=fluency,
            pass_dtype=pass_dtype,
            seed=seed,
        )
        inverter.measures_forms = (
            False  # each start would decode many prompts that nobody asked for
        )
        data = TargetDataModule.of(lm, starts, batch_size=len(starts))
        max_time = None if seconds == math.inf else timedelta(seconds=seconds)
        run_quietly(inverter, data, [watch], max_time)

    with watch.stop_on_ctrl_c():
        unsolved = targets
        most = NO_STEP_LIMIT if steps is None else math.ceil(steps / len(lengths))
        for tried, length in enumerate(lengths):
            starts = [_start(target, i) for i in range(restarts) for target in unsolved]
            run(starts, length, most, watch.seconds_left / (len(lengths) - tried))
            unsolved = [target for target in targets if not watch.found[target.id].exact]
            if not unsolved or watch.stop_requested or watch.seconds_left == 0:
                break
        if prompt_length == "auto" and isinstance(asked, Search):
            _shorten(watch, [t for t in targets if watch.found[t.id].exact], steps, run)
    rows = [watch.result(target.id) for target in targets]
    return rows[0] if isinstance(text, str) else rows


def _start(target: Target, number: int) -> Target:
    """One of several starts of a text, with noise of its own."""
    return dataclasses.replace(target, id=f"{target.id}#{number}", group=target.id)


def _shorten(
    watch: Watch,
    solved: Sequence[Target],
    steps: int | None,
    run: Callable[[Sequence[Target], int, int, float], None],
) -> None:
    """Delete a token of each exact prompt, and search on from there, as long as that works."""
    found = watch.found

    def length_of(target: Target) -> int:
        return len(found[target.id].prompt_ids)

    spent = max((found[target.id].steps for target in solved), default=0)
    last_step = math.inf if steps is None else spent + _SHORTEN_SHARE * (steps - spent)
    last_second = watch.seconds + _SHORTEN_SHARE * watch.seconds_left
    while solved and not watch.stop_requested:
        length = max(map(length_of, solved))
        longest = [target for target in solved if length_of(target) == length]
        steps_left = last_step - max(found[target.id].steps for target in longest)
        seconds_left = last_second - watch.seconds
        if length == 1 or steps_left < 1 or seconds_left <= 0:
            return
        _log.info("found with %s; trying fewer", counted(length, "token"))
        starts = [_start(target, 0) for target in longest]
        watch.latest |= {s.id: found[t.id] for s, t in zip(starts, longest, strict=True)}
        with contextlib.suppress(InputError):  # a template or a method may need this length
            run(starts, length - 1, int(min(_SHORTEN_STEPS, steps_left)), seconds_left)
        solved = [target for target in solved if length_of(target) < length]


def _check_known(lm: FrozenLM, target: Target) -> None:
    """Raise `InputError` for a text with parts that the tokenizer does not know."""
    unknown = lm.tokenizer.unk_token
    if unknown and unknown not in target.text and lm.tokenizer.unk_token_id in target.ids:
        raise InputError(
            f"Expected `text` to be made of tokens of {lm.name}, but it turns {target.text!r} into "
            f"{lm.decode(target.ids)!r}."
        )


def _about_copying(lm: FrozenLM, target: Target) -> str:
    """A line that says whether the text itself, once or repeated, works as a prompt."""
    for copies in range(1, _MOST_COPIES + 1):
        if target.longest_row(copies * len(target.ids)) > (lm.max_positions or math.inf):
            break
        with contextlib.suppress(InputError):  # a template may ask for another length
            said = evaluate_alone(lm, target.ids * copies, target, 0)
            if said.output_ids == target.ids:
                times = "" if copies == 1 else f", {copies} times over,"
                return f"the text itself{times} works as a prompt; looking for another"
    return f"the text itself, up to {_MOST_COPIES} times over, does not work as a prompt"


def _as_frozen_lm(lm: Any, dtype: DType) -> FrozenLM:
    """The LM for the argument `lm`; one that is loaded here goes to the accelerator."""
    if isinstance(lm, FrozenLM):
        return lm
    if isinstance(lm, str):
        _log.info("loading %s", lm)
        return load_lm(lm, dtype, default_device())
    if isinstance(lm, tuple) and len(lm) == 2:
        model, tokenizer = lm
        return FrozenLM(model, tokenizer, name=getattr(model, "name_or_path", "") or "unnamed")
    raise InputError(
        "Expected `lm` to be a FrozenLM, a name, or a pair (model, tokenizer), but got "
        f"{type(lm).__name__}."
    )
