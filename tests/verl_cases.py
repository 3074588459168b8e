"""Builders for the plug-in's tests: VERL's config, a tiny model on disk, batches in VERL's layouts, engines, an oracle.

The oracle is a plain HF model with autograd and torch's AdamW.
"""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

VOCAB = 300

# The two ways to select the strategy: by VERL's group of config files, or by name on VERL's default one.
OURS = ["model_engine=megatrain"]
DP = ["actor_rollout_ref.actor.strategy=megatrain", "actor_rollout_ref.ref.strategy=megatrain"]
# The settings that every run of GRPO has to make.
RUN = [
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.name=embedded",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
]


def composed(*overrides: str, name: str = "ppo_trainer"):
    """VERL's config with these overrides, as Hydra composes it in the driver. Data files are there unless named."""
    import verl  # noqa: F401  (loads the plug-in)
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        data = [f"data.{split}_files={data_file()}" for split in ("train", "val")] if name == "ppo_trainer" else []
        return compose(name, overrides=[*data, *overrides])


@functools.cache
def data_file() -> str:
    """A file with as many prompts as VERL's default batch."""
    path = Path(tempfile.mkdtemp(prefix="megatrain-tests-")) / "prompts.parquet"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    write_prompts(path, 1024)
    return str(path)


def write_prompts(path: Path, rows: int, prompt: Any = None) -> None:
    """prompt: takes the place of a conversation of one message in every row."""
    import pandas as pd

    prompt = prompt or [{"role": "user", "content": "say one"}]
    row = {"data_source": "openai/gsm8k", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "1"}}
    pd.DataFrame([row] * rows).to_parquet(path)


def validate(*overrides: str):
    """The config of a run with these overrides, after the checks that VERL's main makes of it, ours included."""
    from verl.utils.config import validate_config

    config = composed(*RUN, *overrides)
    validate_config(config, use_reference_policy=config.actor_rollout_ref.actor.use_kl_loss, use_critic=False)
    return config


def save_tiny_model(path: str, *, layers: int = 3, tied: bool = False) -> str:
    """Random Qwen2 with a byte-level tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["user assistant system\n0123456789 say one two three four"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.1,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def rl_rows(*, rows: int = 7, seed: int = 0, zero_mask_row: int | None = None) -> list[dict[str, Tensor]]:
    """Random prompts and responses with everything a policy loss reads; some response tokens have mask 0."""
    g = torch.Generator().manual_seed(seed)
    result = []
    for i in range(rows):
        p, r = (int(torch.randint(2, 8, (1,), generator=g)), int(torch.randint(1, 12, (1,), generator=g)))
        mask = (torch.rand(r, generator=g) > 0.25).long()
        mask[0] = 1
        if i == zero_mask_row:
            mask.zero_()
        result.append(
            {
                "prompts": torch.randint(3, VOCAB, (p,), generator=g),
                "responses": torch.randint(3, VOCAB, (r,), generator=g),
                "response_mask": mask,
                "old_log_probs": -5.5 + 0.3 * torch.randn(r, generator=g),
                "ref_log_prob": -5.5 + 0.3 * torch.randn(r, generator=g),
                "advantages": torch.randn(r, generator=g),
            }
        )
    return result


SETTINGS: dict[str, Any] = {
    "temperature": 1.0,
    "calculate_entropy": False,
    "use_dynamic_bsz": False,
    "micro_batch_size_per_gpu": 100,
    "max_token_len_per_gpu": 10_000,
    "use_remove_padding": True,
    "use_fused_kernels": False,
}


def v1_batch(rows: list[dict[str, Tensor]], **settings: Any) -> TensorDict:
    """A batch as the v1 trainer sends it: everything is nested, and there is no attention mask."""
    from verl.utils import tensordict_utils as tu

    tensors = {key: jagged([row[key] for row in rows]) for key in rows[0]}
    tensors["input_ids"] = jagged([torch.cat([row["prompts"], row["responses"]]) for row in rows])
    tensors["position_ids"] = jagged([torch.arange(len(row["prompts"]) + len(row["responses"])) for row in rows])
    tensors["loss_mask"] = jagged([row["response_mask"] for row in rows])
    return tu.get_tensordict(tensors, {**SETTINGS, "global_batch_size": len(rows), **settings})


def v0_batch(rows: list[dict[str, Tensor]], **settings: Any) -> TensorDict:
    """A batch as the v0 trainer sends it: prompts padded left, responses right, then `left_right_2_no_padding`."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    width_p = max(len(row["prompts"]) for row in rows) + 2
    width_r = max(len(row["responses"]) for row in rows) + 3

    def right(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, width_r - len(x)))

    def left(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (width_p - len(x), 0))

    tensors = {key: torch.stack([right(row[key]) for row in rows]) for key in rows[0] if key != "prompts"}
    tensors["prompts"] = torch.stack([left(row["prompts"]) for row in rows])
    tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], dim=1)
    mask = [torch.cat([left(torch.ones(len(r["prompts"]))), right(torch.ones(len(r["responses"])))]) for r in rows]
    tensors["attention_mask"] = torch.stack(mask).long()
    tensors["position_ids"] = (tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return left_right_2_no_padding(tu.get_tensordict(tensors, {**SETTINGS, "global_batch_size": len(rows), **settings}))


def sft_batch(rows: list[dict[str, Tensor]], **settings: Any) -> TensorDict:
    """A batch as the SFT trainer sends it: nested, with `loss_mask` over the full length."""
    from verl.utils import tensordict_utils as tu

    tensors = {
        "input_ids": jagged([torch.cat([row["prompts"], row["responses"]]) for row in rows]),
        "position_ids": jagged([torch.arange(len(row["prompts"]) + len(row["responses"])) for row in rows]),
        "loss_mask": jagged([torch.cat([torch.zeros_like(row["prompts"]), row["response_mask"]]) for row in rows]),
    }
    return tu.get_tensordict(tensors, {**SETTINGS, "global_batch_size": len(rows), **settings})


def policy_loss(**settings: Any):
    """VERL's own policy loss, as its worker binds it."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    return functools.partial(
        ppo_loss, config=ActorConfig(strategy="megatrain", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    )


def supervised_loss():
    from verl.workers.utils.losses import sft_loss

    return functools.partial(sft_loss, config=None)


def optimizer_config(**settings: Any):
    """eps is large so that the first AdamW step is a smooth function of the gradient, not its sign."""
    from megatrain_rl.verl_plugin.config import MegaTrainOptimizerConfig

    return MegaTrainOptimizerConfig(**{"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 1.0, **settings})


def make_engine(model: str, *, optim: Any = None, model_settings: dict[str, Any] | None = None, **knobs: Any):
    """An initialized engine in fp32, built through VERL's registry."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig
    from verl.workers.engine import EngineRegistry

    from megatrain_rl.verl_plugin.config import engine_config

    defaults = {"param_dtype": "float32", "grad_dtype": "float32", "optimizer": "torch", "cpu_threads": 1}
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatrain",
        model_config=HFModelConfig(path=model, **(model_settings or {})),
        engine_config=engine_config(**{**defaults, **knobs}),
        optimizer_config=optim or optimizer_config(),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


class Oracle:
    """A resident HF model, autograd and torch.optim.AdamW over the whole mini-batch as one micro-batch."""

    def __init__(self, model: str):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)

    def model_output(self, data: TensorDict) -> dict[str, Tensor]:
        """log_probs and entropy at every position, the last of each row 0."""
        sequences = data["input_ids"].unbind()
        temperature = data["temperature"]
        temperatures = temperature.tolist() if isinstance(temperature, Tensor) else [temperature] * len(sequences)
        log_probs, entropies = [], []
        for ids, t in zip(sequences, temperatures, strict=True):
            logp = torch.log_softmax(self.model(input_ids=ids[None]).logits[0, :-1] / t, dim=-1)
            end = logp.new_zeros(1)
            log_probs.append(torch.cat([logp.gather(1, ids[1:, None])[:, 0], end]))
            entropies.append(torch.cat([-(logp.exp() * logp).sum(-1), end]))
        return {"log_probs": jagged(log_probs), "entropy": jagged(entropies)}

    def train(self, data: TensorDict, loss_function, *, num_tokens: int) -> tuple[float, float]:
        """One optimizer step; returns the loss and the gradient norm before clipping."""
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(data, batch_num_tokens=num_tokens, dp_size=1, sp_size=1)
        output = self.model_output(data)
        if not tu.get_non_tensor_data(data, "calculate_entropy", False):
            del output["entropy"]
        loss, _ = loss_function(model_output=output, data=data, dp_group=None)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss), float(norm)

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def weights(engine) -> dict[str, Tensor]:
    """The weights that a weight sync would send, in fp32."""
    tensors, adapter = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    assert adapter is None
    return {name: tensor.float().clone() for name, tensor in tensors}


def assert_same_weights(got: dict[str, Tensor], want: dict[str, Tensor], *, atol: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
