"""The card is divided: the sum of the parts, refusals, and runs in which nothing is divided."""

import pytest
import verl_cases
from omegaconf import open_dict
from verl.utils.config import omega_conf_to_dataclass, validate_config

from megatrain_rl.verl_plugin import monitoring
from megatrain_rl.verl_plugin.driver import gpu_share
from megatrain_rl.verl_plugin.driver.gpu_share import Card, visible_card
from verl_patches import ours

GIB = 2**30
H100 = Card(total_bytes=80 * GIB, free_bytes=79 * GIB)
H200 = Card(total_bytes=140 * GIB, free_bytes=139 * GIB)
ACTOR = "actor_rollout_ref.actor.megatrain"
ROLLOUT = "actor_rollout_ref.rollout"


def composed(*overrides: str):
    return verl_cases.composed(*verl_cases.OURS, *verl_cases.RUN, f"{ROLLOUT}.name=vllm", *overrides)


def resolve(config, read_card) -> None:
    """Fill in the fraction, as driver/prepare.py does."""
    card = gpu_share.shared_card(config, read_card)
    with open_dict(config):
        config.actor_rollout_ref.rollout.gpu_memory_utilization = gpu_share.engine_fraction(config, card)


def share(config) -> float:
    return config.actor_rollout_ref.rollout.gpu_memory_utilization


def model_files(path, gb: float) -> str:
    with (path / "model.safetensors").open("wb") as file:
        file.truncate(int(gb * 1e9))
    return f"actor_rollout_ref.model.path={path}"


@pytest.mark.parametrize("card", [H100, H200])
@pytest.mark.parametrize("told", [None, 80])
@pytest.mark.parametrize("budget", [4, 9])
def test_the_sum_stays_inside_the_card(card, told, budget):
    config = composed(f"{ACTOR}.gpu_budget_gb={budget}", f"{ACTOR}.card_gb={'null' if told is None else told}")
    resolve(config, lambda: card)
    usable = card.free_bytes if told is None else told * 1e9
    total = budget * 1e9 + share(config) * card.total_bytes + gpu_share.reserve_bytes(config)
    assert usable - 0.2e9 < total <= usable
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.gpu_memory_utilization == share(config) and not rollout.enable_sleep_mode


@pytest.mark.parametrize("sequences, copies_gb", [(256, 0.467), (1024, 1.867)])
def test_the_reserve_follows_sequences_and_vocabulary(tmp_path, sequences, copies_gb):
    """Three copies of (sequences, vocabulary) numbers in fp32; half a GiB of the card is left free."""
    (tmp_path / "config.json").write_text('{"vocab_size": 151936}')
    config = composed(f"actor_rollout_ref.model.path={tmp_path}", f"{ROLLOUT}.max_num_seqs={sequences}")
    assert gpu_share.reserve_bytes(config) == pytest.approx(2.55e9 + copies_gb * 1e9, abs=1e6)
    resolve(config, lambda: H100)
    division = gpu_share.division(config, H100)
    assert H100.free_bytes - division.budget - division.share - division.beyond >= GIB / 2
    plan = division.settings()
    assert plan["engine_share_gb"] == division.share / 1e9
    assert plan["engine_beyond_share_gb"] == pytest.approx(2.0 + copies_gb, abs=1e-3)
    capped = plan["engine_torch_fraction"] * H100.total_bytes
    assert capped == pytest.approx(division.share + 0.5e9 + copies_gb * 1e9, abs=1e6)
    for part in (division.budget, division.share, division.beyond):
        assert gpu_share.gb(part) in division.line()


@pytest.mark.parametrize("text", ['{"text_config": {"vocab_size": 151936}}', "{}", "not json", None])
def test_a_vocabulary_that_is_elsewhere_or_unknown(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    config = composed(f"actor_rollout_ref.model.path={tmp_path}")
    known = text is not None and "vocab" in text
    assert gpu_share.reserve_bytes(config) == 2_550_000_000 + 3 * 4 * 256 * (151936 if known else 262144)


def test_many_sequences_are_named_where_they_do_not_fit():
    with pytest.raises(ValueError, match="max_num_seqs"):
        resolve(composed(f"{ROLLOUT}.max_num_seqs=30000", f"{ACTOR}.card_gb=100"), lambda: H200)


def test_model_that_does_not_fit_is_refused_and_fp8_halves_it(tmp_path):
    model = model_files(tmp_path, 65.5)
    with pytest.raises(ValueError, match=r"65\.5 GB.*gpu_budget_gb.*quantization=fp8"):
        resolve(composed(model, f"{ACTOR}.card_gb=78"), lambda: H100)
    config = composed(model, f"{ACTOR}.card_gb=78", f"{ROLLOUT}.quantization=fp8")
    resolve(config, lambda: H100)
    assert 0.7 < share(config) < 0.8


def test_fraction_by_hand_is_kept_or_refused():
    config = composed(f"{ROLLOUT}.gpu_memory_utilization=0.6")
    resolve(config, lambda: H100)
    assert share(config) == 0.6
    with pytest.raises(ValueError, match=r"gpu_memory_utilization.*9\.0 GB.*84\.8 GB"):
        resolve(composed(f"{ROLLOUT}.gpu_memory_utilization=0.95"), lambda: H100)
    with pytest.raises(ValueError, match="gpu_memory_utilization=most"):
        resolve(composed(f"{ROLLOUT}.gpu_memory_utilization=most"), lambda: H100)


def test_a_card_in_use_is_refused():
    busy = Card(total_bytes=80 * GIB, free_bytes=30 * GIB)
    with pytest.raises(ValueError, match=r"32\.2 GB.*card_gb"):
        resolve(composed(), lambda: busy)
    resolve(composed(f"{ACTOR}.card_gb=32"), lambda: busy)


@pytest.mark.parametrize("told", ["null", "80"])
def test_a_card_that_cannot_be_read(told):
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=auto.*nvidia-smi"):
        resolve(composed(f"{ACTOR}.card_gb={told}"), lambda: None)
    by_hand = composed(f"{ROLLOUT}.gpu_memory_utilization=0.4", f"{ACTOR}.card_gb={told}")
    resolve(by_hand, lambda: None)
    assert share(by_hand) == 0.4


@pytest.mark.parametrize("overrides", [("trainer.device=cpu",), (f"{ROLLOUT}.name=embedded",)])
def test_without_an_engine_on_the_card_nothing_is_asked(overrides):
    config = composed(*overrides)
    resolve(config, lambda: pytest.fail("asked"))
    assert share(config) == 0.5


def test_other_model_engines_are_left_alone():
    config = composed("model_engine=dp")
    resolve(config, lambda: pytest.fail("asked"))
    assert share(config) == 0.5


def test_card_smaller_than_the_budget_is_named():
    with pytest.raises(Exception, match=r"card_gb=8.*gpu_budget_gb=9"):
        omega_conf_to_dataclass(composed(f"{ACTOR}.card_gb=8").actor_rollout_ref.actor)


def test_verls_main_resolves_before_ray(monkeypatch):
    monkeypatch.setattr(gpu_share, "visible_card", lambda: H100)
    config = composed()
    with open_dict(config):
        config.trainer.device = "cuda"
    validate_config(config, use_reference_policy=False, use_critic=False)
    left = 79 * GIB - 9e9 - gpu_share.reserve_bytes(config)
    assert share(config) == pytest.approx(left / (80 * GIB), abs=1e-3)
    plan = ours.rollout_plan(config.actor_rollout_ref.rollout.custom)
    assert plan == gpu_share.division(config, H100).settings()
    assert monitoring.engine_share(config).share_gb == plan["engine_share_gb"]
    assert omega_conf_to_dataclass(config.actor_rollout_ref.rollout).custom == {"megatrain_rl": plan}


def test_nvidia_smi_is_read(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text('#!/bin/sh\n[ "$2" = GPU-7 ] || exit 1\necho "81559, 81000"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7,3")
    assert visible_card() == Card(total_bytes=81559 << 20, free_bytes=81000 << 20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert visible_card() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_card() is None
