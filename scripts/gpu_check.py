"""Whether everything computes as it should on one GPU, and how fast: one command of at most four minutes.

    python scripts/gpu_check.py                       on a data-centre GPU
    python scripts/gpu_check.py --device cpu --toy    every part at toy size, where there is none

Needs torch, transformers, accelerate, safetensors and numpy, and nothing else; it runs from the checkout. What each
part measures is in docs/gpu.md. A part that fails is named with its error, and the others go on (exit status 1 at the
end); one that would not fit into the time is passed over, and that is said. The last line is JSON: `device`, `toy`,
`versions`, `parts` (the figures of each), `failed`, `skipped`, `seconds`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

Figures = dict[str, Any]
# Seconds that a part may take on a data-centre GPU, what it loads included.
ALLOWED = {
    "limits": 10,
    "golden": 15,
    "replay": 10,
    "bfloat16": 15,
    "pretrain": 45,
    "cocondenser": 30,
    "encode": 45,
    "search": 40,
}
TOY_ALLOWED = 2


def main() -> None:
    """Run the parts, print each one's figures and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--toy", action="store_true", help="toy sizes, which a CPU computes in seconds")
    parser.add_argument("--minutes", type=float, default=4.0, help="parts that would end later are passed over")
    parser.add_argument("--parts", nargs="+", choices=ALLOWED, default=list(ALLOWED), help="these parts only")
    parser.add_argument("--golden", type=Path, default=ROOT / "tests" / "golden", help="the reference numbers")
    given = parser.parse_args()
    if given.device == "cpu" and not given.toy:
        parser.error("--device cpu takes hours at full size: add --toy")
    began = time.monotonic()  # loading the libraries counts
    import accelerate
    import torch
    import transformers
    from gpu_check_machine import Machine, limits
    from gpu_check_numbers import bfloat16, golden, replay
    from gpu_check_speed import cocondenser, encode, pretrain, search

    from condenser.errors import UserError
    from condenser.models.rows import resolve_device

    try:
        machine = Machine(resolve_device(given.device), toy=given.toy)
    except UserError as error:
        parser.error(str(error))
    print(f"{machine.name}, torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    parts: dict[str, Callable[[], Figures]] = {
        "limits": lambda: limits(machine),
        "golden": lambda: golden(machine, given.golden),
        "replay": lambda: replay(machine),
        "bfloat16": lambda: bfloat16(machine),
        "pretrain": lambda: pretrain(machine),
        "cocondenser": lambda: cocondenser(machine),
        "encode": lambda: encode(machine),
        "search": lambda: search(machine),
    }
    allowed = dict.fromkeys(ALLOWED, TOY_ALLOWED) if given.toy else ALLOWED
    asked = {name: parts[name] for name in given.parts}
    figures, failed, skipped = run_parts(asked, allowed, began + 60 * given.minutes, machine.free)
    result = {
        "device": machine.name,
        "toy": given.toy,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
        },
        "parts": figures,
        "failed": failed,
        "skipped": skipped,
        "seconds": time.monotonic() - began,
    }
    print(json.dumps(result))
    if failed:
        sys.exit(1)


def run_parts(
    parts: Mapping[str, Callable[[], Figures]],
    allowed: Mapping[str, float],
    until: float,
    free: Callable[[], None],
) -> tuple[dict[str, Figures], dict[str, str], list[str]]:
    """Run one part after the other and print what comes out.

    Args:
        parts: each returns its figures.
        allowed: seconds that a part may take.
        until: when all is to be done, by `time.monotonic`.
        free: called after each part.

    Returns:
        The figures of each part, the errors of those that failed, and the names of those that no time was left for.
    """
    from condenser.errors import first_line

    figures: dict[str, Figures] = {}
    failed: dict[str, str] = {}
    skipped: list[str] = []
    for name, run in parts.items():
        began = time.monotonic()
        left = max(0.0, until - began)
        if left < allowed[name]:
            skipped.append(name)
            print(f"{name:12} skipped: {left:.0f} s are left, it may take {allowed[name]:.0f} s", flush=True)
            continue
        try:
            figures[name] = run()
        except Exception as error:  # whatever it is, it belongs to this part
            failed[name] = f"{type(error).__name__}: {first_line(error)}"
            print(f"{name:12} FAILED: {failed[name]}", flush=True)
        else:
            show(name, figures[name] | {"seconds": time.monotonic() - began})
        free()
    return figures, failed, skipped


def show(part: str, figures: Figures) -> None:
    """Print the figures of a part, a line each."""
    for name, value in figures.items():
        text = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
        print(f"{part:12} {name:38} {text:>14}", flush=True)


if __name__ == "__main__":
    main()
