#!/usr/bin/env python
"""Time this tool against nanoGCG 0.3.0: GCG's step, and the way to an exact, verified match.

nanoGCG needs an environment of its own:

    python3 -m venv nano
    nano/bin/pip install torch==2.13.0 transformers==4.47.1 nanogcg==0.3.0 accelerate
    .venv/bin/python scripts/compare_nanogcg.py nano/bin/python            # seconds of a step
    .venv/bin/python scripts/compare_nanogcg.py nano/bin/python --matches  # seconds to a match

Both sides run in turn on the same LM. nanoGCG runs in float32 (`--dtype bfloat16` for the other).
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from dlmi import FrozenLM, Inverter, Target, TargetDataModule, invert, load_lm
from dlmi.bench.timing import StepClock
from dlmi.lm.loading import PACKAGED
from dlmi.lm.memory import keep_freed_memory
from dlmi.methods import GCG
from dlmi.run.quiet import run_quietly
from dlmi.targets.files import texts_to_targets

# What the model is to answer, and the request that the learned tokens stand behind.
CHATS = (
    ("Sure, here is a poem about cats", "Tell me about the weather today."),
    ("It was found under the old bridge.", "Where is my bicycle?"),
    ("The capital of France is Berlin.", "What is the capital of France?"),
    ("No, I prefer silence and stones.", "Do you like music?"),
)

# Runs in nanoGCG's environment: settings come as JSON, one JSON value is the last line printed.
THEIRS = """
import json, sys, time
import nanogcg, torch, transformers

given = json.loads(sys.argv[1])
transformers.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained(
    given["folder"], torch_dtype=getattr(torch, given["dtype"])
)
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_file=given["folder"] + "/tokenizer.json",
    eos_token="<|im_end|>", pad_token="<|im_end|>",
)
tokenizer.chat_template = given["chat_template"]

def run(steps, **options):
    config = nanogcg.GCGConfig(
        num_steps=steps, search_width=given["width"], topk=256, seed=0, verbosity="ERROR",
        optim_str_init=" ".join(["x"] * given["length"]), add_space_before_target=False, **options,
    )
    start = time.perf_counter()
    found = nanogcg.run(model, tokenizer, given["request"], given["text"], config)
    return time.perf_counter() - start, found.best_string

if given["steps"] is not None:  # the difference leaves out what is done once
    run(1)
    print(json.dumps((run(1 + given["steps"])[0] - run(1)[0]) / given["steps"]))
else:
    seconds, string = run(100_000, early_stop=True)
    message = given["request"].replace("{optim_str}", string)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    wanted = tokenizer(given["text"], add_special_tokens=False)["input_ids"]
    said = model.generate(ids, max_new_tokens=len(wanted), do_sample=False)[0, ids.shape[1]:]
    print(json.dumps([seconds, said.tolist() == wanted]))
"""


def theirs(python: str, seconds: float | None = None, **given: Any) -> Any:
    """What nanoGCG gives; None where it takes longer than a limit."""
    command = [python, "-c", THEIRS, json.dumps(given)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout.splitlines()[-1])


def our_step(lm: FrozenLM, target: Target, length: int, width: int, steps: int) -> float:
    """Median seconds of a step of GCG."""
    method = GCG(search_width=width)
    module = Inverter(method, length, steps=steps + 2, eval_every=steps + 2, prompt_bos=True)
    clock = StepClock(lm.device, warm_up=2)
    run_quietly(module, TargetDataModule.of(lm, [target], batch_size=1), [clock])
    return statistics.median(clock.seconds)


def compare_steps(lm: FrozenLM, options: argparse.Namespace) -> None:
    """Print one line for each width."""
    [target] = texts_to_targets(lm, [options.text])
    for width in options.widths:
        steps = 8 if width <= 64 else 1
        mine, other = [], []
        for _ in range(options.rounds):
            other.append(
                theirs(
                    options.python,
                    folder=lm.model.config._name_or_path,
                    dtype=options.dtype,
                    # BoS and the prompt, as this tool has them: a chat would add tokens.
                    chat_template="<|im_start|>{{ messages[0]['content'] }}",
                    request="{optim_str}",
                    text=options.text,
                    length=options.length,
                    width=width,
                    steps=steps,
                )
            )
            mine.append(our_step(lm, target, options.length, width, steps))
        ours, nano = statistics.median(mine), statistics.median(other)
        print(
            f"width {width}, N={options.length}, M={len(target.ids)}: nanoGCG in {options.dtype} "
            f"{nano:.2f} s, this tool in {lm.dtype_name} {ours:.2f} s, ratio {nano / ours:.2f}",
            flush=True,
        )


def compare_matches(lm: FrozenLM, options: argparse.Namespace) -> None:
    """Print one line for each chat: seconds to a prompt whose greedy decode is the answer."""
    for text, request in CHATS:
        row = invert(
            lm,
            text,
            template=f"{request} {{slot}}",
            chat=True,
            prompt_length=options.length,
            seconds=options.seconds,
        )
        ours = f"{row.seconds:.0f} s" if row.exact else f"not in {options.seconds:.0f} s"
        found = None
        if not options.ours_only:
            found = theirs(
                options.python,
                options.seconds,
                folder=lm.model.config._name_or_path,
                dtype=options.dtype,
                chat_template=lm.tokenizer.chat_template,
                request=f"{request} {{optim_str}}",
                text=text,
                length=options.length,
                width=64,
                steps=None,
            )
        other = "not run" if options.ours_only else f"not in {options.seconds:.0f} s"
        if found is not None:
            other = f"{found[0]:.0f} s, {'exact' if found[1] else 'not what it decodes'}"
        print(f"{text!r}: this tool {ours}; nanoGCG in {options.dtype} {other}", flush=True)


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="Python of the environment with nanoGCG.")
    parser.add_argument("--matches", action="store_true", help="Time exact matches in four chats.")
    parser.add_argument("--ours_only", action="store_true", help="With --matches: not nanoGCG.")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--text", default=" The quick brown fox jumps over the lazy")
    parser.add_argument("--length", type=int, default=20, help="Prompt tokens, N.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=180.0, help="Limit of a match.")
    parser.add_argument("--dtype", default="float32", help="Of nanoGCG.")
    options = parser.parse_args()
    if not options.ours_only and not Path(options.python).exists():
        sys.exit(f"Expected a Python with nanoGCG, but {options.python} does not exist.")
    keep_freed_memory()  # as the command line does
    lm = load_lm(PACKAGED)
    (compare_matches if options.matches else compare_steps)(lm, options)


if __name__ == "__main__":
    main()
