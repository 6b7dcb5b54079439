#!/usr/bin/env python
"""Time a GCG step of this tool against one of nanoGCG: same LM, same sizes, in turn.

nanoGCG 0.3.0 needs an environment of its own:

    python3 -m venv nano
    nano/bin/pip install torch==2.13.0 transformers==4.47.1 nanogcg==0.3.0 accelerate
    .venv/bin/python scripts/compare_nanogcg.py nano/bin/python
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from dlmi import FrozenLM, Inverter, Target, TargetDataModule, load_lm
from dlmi.bench.timing import StepClock
from dlmi.lm.loading import PACKAGED
from dlmi.lm.memory import keep_freed_memory
from dlmi.methods import GCG
from dlmi.run.quiet import run_quietly
from dlmi.targets.files import texts_to_targets

# BoS and the prompt, as this tool has them: a chat template would add tokens to every row.
THEIRS = """
import json, sys, time
import nanogcg, torch, transformers
folder, text, length, width, steps = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
transformers.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_file=folder + "/tokenizer.json", eos_token="<|im_end|>", pad_token="<|im_end|>",
)
tokenizer.chat_template = "<|im_start|>{{ messages[0]['content'] }}"

def seconds(count):
    config = nanogcg.GCGConfig(
        num_steps=count, search_width=width, topk=256, seed=0, verbosity="ERROR",
        optim_str_init=" ".join(["x"] * length), add_space_before_target=False,
    )
    start = time.perf_counter()
    nanogcg.run(model, tokenizer, "{optim_str}", text, config)
    return time.perf_counter() - start

seconds(1)
print(json.dumps((seconds(1 + steps) - seconds(1)) / steps))
"""


def our_seconds(lm: FrozenLM, target: Target, length: int, width: int, steps: int) -> float:
    """Median time of a step of this tool."""
    method = GCG(search_width=width)
    module = Inverter(method, length, steps=steps + 2, eval_every=steps + 2, prompt_bos=True)
    clock = StepClock(lm.device)
    run_quietly(module, TargetDataModule.of(lm, [target], batch_size=1), [clock])
    return statistics.median(clock.seconds)


def main() -> None:
    """Print one line per width."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="Python of the environment with nanoGCG.")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 512])
    parser.add_argument("--text", default=" The quick brown fox jumps over the lazy")
    parser.add_argument("--length", type=int, default=20, help="Prompt tokens, N.")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    keep_freed_memory()  # as the command line does
    lm = load_lm(PACKAGED)
    [target] = texts_to_targets(lm, [options.text])
    folder = Path(lm.model.config._name_or_path)
    for width in options.widths:
        steps = 8 if width <= 64 else 1
        ours, theirs = [], []
        for _ in range(options.rounds):
            arguments = [str(folder), options.text, options.length, width, steps]
            done = subprocess.run(
                [options.python, "-c", THEIRS, *map(str, arguments)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            theirs.append(json.loads(done.stdout.splitlines()[-1]))
            ours.append(our_seconds(lm, target, options.length, width, steps))
        mine, other = statistics.median(ours), statistics.median(theirs)
        print(
            f"width {width}, N={options.length}, M={len(target.ids)}: nanoGCG {other:.2f} s, "
            f"this tool {mine:.2f} s, ratio {other / mine:.2f}",
            file=sys.stdout,
            flush=True,
        )


if __name__ == "__main__":
    main()
