"""Every benchmark runs through the command line at toy size, and a bad argument is one clear line.

`peers` has its tests in test_peers.py.
"""

import json
import sys

import pytest
from torch.utils.flop_counter import FlopCounterMode

from megatrain_rl.bench import adam, head
from megatrain_rl.bench import step as step_module
from megatrain_rl.cli import main
from megatrain_rl.trainer import StreamTrainer

STEP = (
    "step",
    "--shape",
    "tiny",
    "--layers",
    "2",
    "--mean-length",
    "20",
    "--steps",
    "3",
    "--warmup",
    "1",
    "--settle",
    "1",
)
PACKS = ("--set", "pack_tokens=64")
STEP_METRICS = {
    "step_s", "useful_tflops", "matmul_fraction", "matmul_burst_fraction", "speed_of_light", "tokens_per_s", "host_rss_gib",
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, bool]]:
    """(packs, final) of every forward_backward, and "update" for every optim_step."""
    seen = []
    forward_backward, optim_step = StreamTrainer.forward_backward, StreamTrainer.optim_step

    def spy(self, packs, objective, *, final=False):
        seen.append((len(packs), final))
        return forward_backward(self, packs, objective, final=final)

    def spy_step(self):
        seen.append("update")
        return optim_step(self)

    monkeypatch.setattr(StreamTrainer, "forward_backward", spy)
    monkeypatch.setattr(StreamTrainer, "optim_step", spy_step)
    return seen


def test_step_serves_several_cases_with_one_load(run_bench, calls, monkeypatch):
    loads = []
    from_config = step_module.StreamTrainer.from_config
    monkeypatch.setattr(
        step_module.StreamTrainer, "from_config", lambda *a, **k: loads.append(1) or from_config(*a, **k)
    )
    written = run_bench(*STEP, *PACKS, "--case", "long=200", "--case", "short=60")
    assert loads == [1] and calls.count("update") == 1 + 8
    assert all(call == "update" or call[1] for call in calls), "an update follows, so the optimizer may begin"
    for case, tokens in (("long", 200), ("short", 60)):
        figures = written.figures(case)
        assert set(figures) == STEP_METRICS
        assert figures["tokens_per_s"] == pytest.approx(tokens / figures["step_s"], rel=2e-3)
    assert sum(line.startswith("step ") for line in written.raw) == 6
    assert sum(line.startswith("warm-up ") for line in written.raw) == 2
    norms = [float(line.split("grad norm ")[1]) for line in written.raw if "grad norm" in line]
    assert len(norms) == 1 + 8 and max(norms) < 0.5, "clipping must not change what is measured"


def test_reference_schedule_is_one_sweep_per_micro_batch(run_bench, calls):
    written = run_bench(*STEP, "--case", "a=200", "--schedule", "reference", "--micro-batch-tokens", "64")
    assert calls.count("update") == 1 + 4
    sweeps = calls[: calls.index("update")]
    assert len(sweeps) >= 4 and set(sweeps) == {(1, False)}
    assert any("checkpoint_interval=4" in line for line in written.raw)


def test_no_overlap_promises_no_update(run_bench, calls):
    run_bench(*STEP, *PACKS, "--case", "a=100", "--no-overlap", "--objective", "nll")
    assert {call[1] for call in calls if call != "update"} == {False}


def test_trace_and_picture(run_bench, tmp_path):
    trace, picture = tmp_path / "t.json", tmp_path / "t.png"
    run_bench(*STEP, *PACKS, "--case", "a=60", "--trace", str(trace), "--trace-picture", str(picture))
    assert "traceEvents" in json.loads(trace.read_text())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_skipped_step_is_no_measurement(run_bench):
    with pytest.raises(RuntimeError, match="skipped"):
        run_bench(*STEP, *PACKS, "--case", "a=60", "--advantage-std", "nan")


def test_logprob(run_bench):
    words = ("--shape", "tiny", "--mean-length", "20", "--steps", "3", "--case", "a=200", "--case", "b=60")
    written = run_bench("logprob", *words, *PACKS)
    assert set(written.figures("a")) == set(written.figures("b")) == STEP_METRICS
    means = [float(line.split("mean log-prob ")[1]) for line in written.raw if "mean log-prob" in line]
    # two cases of five steps; a uniform guess over 320 tokens is worth -5.77, and each sequence's last token none
    assert len(means) == 10 and all(-5.8 < mean < -5.0 for mean in means)


def test_shared_prompts(run_bench):
    """The same rows twice, a fraction of the tokens computed once; the gradients' errors are those of rounding."""
    written = run_bench(
        "shared-prompts", "--shape", "tiny", "--layers", "2", "--steps", "3", "--settle", "2", "--prompts", "3",
        "--case", "s=24x6x4", "--check-layers", "1", "--set", "pack_tokens=128",
    )  # fmt: skip
    shared, plain = written.figures("s"), written.figures("s-unshared")
    assert set(plain) == STEP_METRICS
    assert set(shared) == STEP_METRICS | {"speedup", "gradient_error", "gradient_error_unshared"}
    assert shared["speedup"] == pytest.approx(plain["step_s"] / shared["step_s"], rel=2e-3)
    assert 1e-4 < shared["gradient_error"] < 1.3 * shared["gradient_error_unshared"] < 0.1
    lines = [line for line in written.raw if line.endswith("computed")]
    assert lines == ["s-unshared: 360 tokens a step, 360 computed", "s: 360 tokens a step, 144 computed"]
    flops = {
        name: figures["useful_tflops"] * figures["step_s"] for name, figures in (("shared", shared), ("plain", plain))
    }
    assert flops["shared"] < 0.5 * flops["plain"], "what is not computed is not counted"


def test_head(run_bench, monkeypatch):
    """By a clock that counts the operations of matrix products, a second for 1e12 of them."""

    def timed(device, operation, repeats) -> float:
        with FlopCounterMode(display=False) as counter:
            operation()
        return counter.get_total_flops() / 1e12

    monkeypatch.setattr(head, "timed", timed)
    figures = run_bench("head", "--shape", "tiny", "--tokens", "96", "--chunk", "64", "--entropy").figures("head")
    assert figures["forward_vs_matmul"] == 1 and figures["forward_useful_tflops"] == 1
    assert figures["forward_backward_ms"] > figures["forward_ms"] > 0
    ratio = figures["forward_backward_ms"] / figures["forward_backward_matmul_ms"]
    assert figures["forward_backward_vs_matmul"] == pytest.approx(ratio, rel=2e-3)
    assert figures["host_rss_gib"] > 0.05


def test_link(run_bench):
    figures = run_bench("link", "--seconds", "0.05", "--threads", "1").figures("link")
    assert set(figures) == {
        "h2d_gb_s", "d2h_gb_s", "both_gb_s", "host_copy_gb_s", "adamw_alone_gparams_s", "adamw_while_both_gparams_s",
        "both_while_adamw_gb_s", "host_rss_gib",
    }  # fmt: skip
    assert min(figures.values()) > 0


def test_adam(run_bench, monkeypatch):
    monkeypatch.setattr(adam, "usable_cores", lambda: 1)
    written = run_bench("adam", "--parameters", "100000", "--threads", "1", "--threads", "64")
    exact, small = written.figures("exact"), written.figures("bf16-moments")
    assert exact["threads"] == small["threads"] == 1 and exact["host_rss_gib"] > 0.05
    ratio = exact["params_per_s"] / exact["torch_fused_params_per_s"]
    assert exact["vs_torch_fused"] == pytest.approx(ratio, rel=2e-3)
    # 26 bytes a parameter and 18 over the same copy bandwidth
    bandwidth = [26 * exact["params_per_s"], 18 * small["params_per_s"]]
    fractions = [exact["copy_bandwidth_fraction"], small["copy_bandwidth_fraction"]]
    assert bandwidth[0] / fractions[0] == pytest.approx(bandwidth[1] / fractions[1], rel=5e-3)
    assert sum("passes" in line for line in written.raw) >= 3


def test_adam_without_deepspeed_has_a_line_and_no_figure(run_bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)
    written = run_bench("adam", "--parameters", "100000", "--threads", "1")
    assert "vs_torch_fused" in written.figures("exact")
    assert not any("deepspeed" in metric for metric in written.figures("exact"))
    assert any("DeepSpeedCPUAdam: not measured" in line for line in written.raw)


@pytest.mark.parametrize(
    "words, names",
    [
        (("step", "--shape", "gpt-5"), "--shape gpt-5"),
        (("step", "--shape", "tiny", "--layers", "0"), "--layers 0"),
        (("step", "--shape", "tiny", "--case", "16384"), "--case 16384"),
        (("step", "--shape", "tiny", "--case", "a=many"), "--case a=many"),
        (("step", "--shape", "tiny", "--case", "a=1", "--case", "a=2"), "--case"),
        (("step", "--shape", "tiny", "--steps", "2"), "--steps 2"),
        (("step", "--shape", "tiny", "--warmup", "-1"), "--warmup -1"),
        (("step", "--shape", "tiny", "--settle", "-1"), "--settle -1"),
        (("step", "--shape", "tiny", "--set", "pack_token=3"), "--set pack_tokens"),
        (("step", "--shape", "tiny", "--set", "pack_tokens"), "--set pack_tokens"),
        (("step", "--shape", "tiny", "--trace-picture", "t.png"), "--trace-picture"),
        (("step", "--shape", "tiny", "--schedule", "reference", "--micro-batch-tokens", "0"), "--micro-batch-tokens 0"),
        (("step", "--shape", "tiny", "--json", "/no/such/folder/x.json"), "--json"),
        (("logprob", "--shape", "tiny", "--mean-length", "1"), "--mean-length 1"),
        (("shared-prompts", "--shape", "tiny", "--case", "a=24x6"), "--case a=24x6"),
        (("shared-prompts", "--shape", "tiny", "--prompts", "0"), "--prompts 0"),
        (("shared-prompts", "--shape", "tiny", "--check-layers", "0"), "--check-layers 0"),
        (("head", "--shape", "tiny", "--chunk", "0"), "--chunk 0"),
        (("link", "--threads", "0"), "--threads 0"),
        (("adam", "--passes", "1"), "--passes 1"),
        (("adam", "--threads", "0"), "--threads 0"),
        (("peers", "--shape", "tiny", "--time-limit", "0"), "--time-limit 0"),
        (("peers", "--shape", "tiny", "--set", "ring=3"), "--set ring"),
    ],
)
def test_a_bad_argument_is_one_line_that_names_it(words, names):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *words, "--quick"])
    message = str(stopped.value.code)
    assert message.startswith("megatrain-rl: ") and names in message and "\n" not in message
