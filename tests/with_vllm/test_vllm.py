"""Weight sync into a real vLLM.

On the CPU with vLLM's CPU build in an environment of its own (vllm_venv.py), marked `gpu` with the vLLM that is
installed beside the tests. Nothing of vLLM runs in this process: sync_checks.py and VERL measure in theirs, under hard
time limits, and the tests judge.
"""

import json
from pathlib import Path

import pytest
import vllm_venv
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
# Largest difference of a log-prob from plain Hugging Face, in fp32: the CPU to rounding, CUDA with TF32 in vLLM's
# attention.
ERROR = {"cpu": 2e-4, "cuda": 1e-2}
# A changed weight must move a log-prob by at least this.
MOVED = 0.05
TRANSFER_LIMIT = {"MEGATRAIN_WEIGHT_TRANSFER_TIMEOUT": "12"}


# ---- weight sync ----


@pytest.fixture(scope="module")
def checks(place, tmp_path_factory) -> dict[str, dict]:
    """Measurements of sync_checks.py, by head.

    On the CPU both run at once: each spends its time importing, one process after the other.
    """
    at_once = [["tied", "untied"]] if place.device == "cpu" else [["tied"], ["untied"]]
    folders = {head: tmp_path_factory.mktemp(head) for heads in at_once for head in heads}
    for heads in at_once:
        running = []
        try:
            for head in heads:
                command = [place.python, HERE / "sync_checks.py", folders[head], place.device, head]
                log = folders[head] / "log"
                environment = place.environment | TRANSFER_LIMIT
                running.append((vllm_venv.start(command, log=log, environment=environment), log))
            for process, log in running:
                vllm_venv.finish(process, seconds=240, log=log)
        finally:
            for process, _ in running:
                vllm_venv.kill(process)
    return {
        head: json.loads((folder / "result.json").read_text()) | {"folder": folder} for head, folder in folders.items()
    }


@pytest.fixture(params=["tied", "untied"])
def measured(request, checks) -> dict:
    return checks[request.param]


@pytest.fixture
def limit(place) -> float:
    return ERROR[place.device]


def test_every_parameter_reaches_the_engine(measured, limit):
    """Each one alone, changed in the trainer and synced, moves the engine's output as it does plain Hugging Face's."""
    names = [n for n, _ in AutoModelForCausalLM.from_pretrained(measured["folder"] / "model").named_parameters()]
    assert list(measured["every_parameter"]) == names and len(names) in (26, 27)
    for name, change in measured["every_parameter"].items():
        assert change["moved"] > MOVED and change["error"] < limit, f"{name}: {change}"


def test_after_a_sync_the_engine_is_as_good_as_fresh(place, measured, limit):
    """Greedy text and log-probs of the weights that the engine was started with come back after it has had others.

    On the CPU they do to the bit.
    """
    fresh, later = measured["fresh"], measured["back_to_the_start"]
    assert fresh["error"] < limit and len(set(fresh["tokens"])) > 4
    assert later["moved"] > MOVED and later["tokens_before"] != fresh["tokens"]
    assert later["tokens"] == fresh["tokens"] and later["error"] <= {"cpu": 0, "cuda": 1e-5}[place.device]


def test_nothing_is_left_in_the_prefix_cache(measured, limit):
    """A prompt that was cached is computed anew after a training step and a sync."""
    cache = measured["prefix_cache"]
    assert cache["cached_before"] >= 64 and cache["cached_after"] == 0
    assert cache["moved"] > MOVED and cache["error"] < limit


def test_the_size_of_the_bucket_changes_nothing(measured, limit):
    """Several buckets, one bucket and, on CUDA, a bucket smaller than a tensor."""
    assert len(measured["buckets"]) == 2
    for size, change in measured["buckets"].items():
        assert change["moved"] > MOVED and change["error"] < limit, f"{size} MiB: {change}"


def test_memory_is_flat_over_20_syncs(measured):
    """Memory grows by less than one kept copy of the weights in four syncs would add, on the host and on the card."""
    memory = measured["memory"]
    samples = memory["samples"][4:]
    allowed = memory["model_mib"] * len(samples) / 4
    assert len(memory["samples"]) == 20
    for kind in ("host", "device"):
        grown = [sample[kind] - samples[0][kind] for sample in samples]
        assert max(grown) < allowed, f"{kind} memory in MiB, from the fifth sync on: {grown}"
    assert memory["segments_left"] == []


def test_the_server_asks_for_no_text(measured):
    """verl_patches/no_detokenization.py, with VERL's own server; its tokens are the engine's."""
    server = measured["server"]
    assert server["detokenize"] is False and server["tokens"] == server["expected"] and len(server["tokens"]) == 16


def test_a_failing_worker_is_an_error_and_not_a_hang(measured, limit):
    """A tensor that vLLM refuses ends the sync by its time limit, which the error names; the next sync is good."""
    failed = measured["worker_error"]
    [(variable, seconds)] = TRANSFER_LIMIT.items()
    assert failed["error"] == "RuntimeError" and "took no weights" in failed["message"]
    assert variable in failed["message"] and f"{seconds} s" in failed["message"]
    assert failed["error_afterwards"] < limit


def test_a_bucket_that_is_too_small_is_an_error_at_once(place, measured):
    """The sender refuses it by itself and waits for no limit: another error than the one of a limit that has passed.

    Only where there is no CUDA IPC; test_the_size_of_the_bucket_changes_nothing has the other case.
    """
    if place.device == "cuda":
        assert measured["oversized"] == {}
        return
    refused = measured["oversized"]
    assert refused["error"] == "ValueError" and "embed_tokens" in refused["message"]
    assert "rollout.checkpoint_engine.update_weights_bucket_megabytes" in refused["message"]
