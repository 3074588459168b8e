"""Ends the quickstart: a PNG of the reward curve, completions before and after, and the last line, A -> B.

usage: report.py BEFORE.json AFTER.json grpo_metrics.jsonl CURVE.png (the .json are evaluate.py's)
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw_curve(steps: list[int], rewards: list[float], before: float, after: float, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(steps, rewards, marker=".", label="training batches")
    axes.plot([0, steps[-1]], [before, after], "o", color="black", label="held-out problems")
    axes.set(xlabel="GRPO step", ylabel="mean reward", ylim=(0, 1.05), title="Quickstart: reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def print_samples(before: dict[str, Any], after: dict[str, Any]) -> None:
    print(f"{'held-out problem':<18}{'answer':<8}{'before GRPO':<14}after GRPO")
    for (question, answer, first), (_, _, last) in zip(before["samples"], after["samples"], strict=True):
        print(f"{question:<18}{answer:<8}{first!r:<14}{last!r}")


def main() -> None:
    before, after = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    records = [json.loads(line) for line in Path(sys.argv[3]).read_text().splitlines()]
    curve = [(r["step"], r["data"]["critic/score/mean"]) for r in records if "critic/score/mean" in r["data"]]
    steps, rewards = zip(*curve, strict=True)
    draw_curve(list(steps), list(rewards), before["reward"], after["reward"], Path(sys.argv[4]))
    print_samples(before, after)
    print(f"greedy accuracy on held-out problems: {before['greedy_accuracy']:.3f} -> {after['greedy_accuracy']:.3f}")
    print(f"reward curve: {sys.argv[4]}")
    print(f"held-out reward: {before['reward']:.3f} -> {after['reward']:.3f}")


if __name__ == "__main__":
    main()
