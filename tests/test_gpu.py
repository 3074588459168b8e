"""What only a GPU can show: real widths against eager bf16, memory promises, injected delays."""

import dataclasses
import gc
import os
import sys
import types

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from megatrain_rl.batch import pack, pack_sequences
from megatrain_rl.bench.data import random_sequences
from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.model.template import LayerRunner
from megatrain_rl.objectives import NegativeLogLikelihood, ObjectiveOutput
from megatrain_rl.planner import CONTEXT_BYTES, PACK_MULTIPLE
from megatrain_rl.streaming.executor import StreamExecutor
from megatrain_rl.trainer import StreamTrainer
from megatrain_rl.transfer.lanes import Lane

pytestmark = pytest.mark.gpu


def hf_gradients(
    weights: dict[str, torch.Tensor], config, micro_batches: list[torch.Tensor], dtype
) -> dict[str, torch.Tensor]:
    """Gradients of the mean negative log-likelihood by plain autograd, micro-batch by micro-batch into `.grad`, on the GPU."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.load_state_dict({n: w.to("cuda", dtype) for n, w in weights.items()})
    total = sum(data.shape[0] * (data.shape[1] - 1) for data in micro_batches)
    for data in micro_batches:
        hidden = model.model(input_ids=data.cuda(), use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden).float().flatten(0, 1)
        (torch.nn.functional.cross_entropy(logits, data[:, 1:].cuda().flatten(), reduction="sum") / total).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def streamed_gradients(config, data: torch.Tensor, *, compile: bool):
    """Weights, gradients (by name, in host memory) and loss of a StreamTrainer over two packs of two rows."""
    trainer = StreamTrainer.from_config(
        config, config=StreamConfig(pack_tokens=1024, compile=compile), adamw=AdamWConfig(), seed=3
    )
    packs = [pack(list(data[i : i + 2]), [i, i + 1]) for i in (0, 2)]
    out = trainer.forward_backward(packs, NegativeLogLikelihood(packs))
    gradients = {n: g.clone() for n, g in trainer.named_gradients()}
    weights = {n: w.clone() for n, w in trainer.named_parameters()}
    trainer.close()
    del trainer
    torch.cuda.empty_cache()
    return weights, gradients, sum(out.losses)


def test_four_real_layers_are_no_worse_than_eager():
    """Qwen2.5-7B width and vocabulary, four layers, bf16: against fp32 no worse than eager bf16 on the same micro-batches."""
    config = shape_config("qwen2.5-7b", layers=4)
    data = torch.randint(0, config.vocab_size, (4, 512), generator=torch.Generator().manual_seed(0))
    micro_batches = [data[:2], data[2:]]
    weights, plain, loss = streamed_gradients(config, data, compile=False)
    _, compiled, _ = streamed_gradients(config, data, compile=True)
    truth = hf_gradients(weights, config, micro_batches, torch.float32)
    eager = hf_gradients(weights, config, micro_batches, torch.bfloat16)
    bars = {n: (eager[n].float() - exact).norm().item() for n, exact in truth.items()}
    bar = sum(b**2 for b in bars.values()) ** 0.5
    for label, ours in (("eager kernels", plain), ("compiled", compiled)):
        errors = {n: (ours[n].cuda().float() - exact).norm().item() for n, exact in truth.items()}
        overall = sum(e**2 for e in errors.values()) ** 0.5 / bar
        # a key's bias has no gradient but rounding noise
        worst = max((errors[n] / bars[n], n) for n in bars if "k_proj.bias" not in n)
        print(
            f"{label}: loss {loss:.5f}, error against fp32, streamed / eager bf16: overall {overall:.4f}, worst {worst}"
        )
        # the same kernels layer by layer give the same error to within the luck of rounding
        assert overall <= 1.01
        assert worst[0] <= 1.1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lane", ["compute", "upload", "fetch", "download"])
def test_delays_on_a_lane_change_no_bit(tmp_path, monkeypatch, deterministic, lane, tied):
    """Sleeping kernels on one lane: whoever failed to wait for it would read old or half-written numbers."""
    directory = tiny.saved(tiny.model(tiny.config(layers=7, tied=tied), dtype=torch.bfloat16), tmp_path)
    data = tiny.sequences()

    def run(delayed: bool, *, resident_bytes=None, **knobs):
        trainer = tiny.trainer(
            directory, device="cuda", param_dtype="bfloat16", grad_dtype="bfloat16", reference=True,
            adamw=AdamWConfig(lr=1e-3, clip_grad=None),  # every update begins beneath backward
            **knobs,
        )  # fmt: skip
        ring_in_head = knobs.get("ring_depth") != 1
        trainer._executor._plan = dataclasses.replace(trainer._executor._plan, ring_in_head=ring_in_head)
        if resident_bytes is not None:
            trainer._executor._plan = dataclasses.replace(trainer._executor._plan, resident_bytes=resident_bytes)
        with monkeypatch.context() as patch:
            if delayed and lane == "compute":

                def slowed(method):
                    def slow(self, *args):
                        torch.cuda._sleep(3_000_000)
                        return method(self, *args)

                    return slow

                slow = ((LayerRunner, "layer"), (LayerRunner, "vjp"), (LayerRunner, "norm"), (StreamExecutor, "_push"))
                for owner, name in slow:
                    patch.setattr(owner, name, slowed(getattr(owner, name)))
            elif delayed:
                chosen, enter = getattr(trainer._executor._lanes, lane), Lane.__enter__

                def slow_enter(self):
                    enter(self)
                    if self is chosen:
                        torch.cuda._sleep(3_000_000)

                patch.setattr(Lane, "__enter__", slow_enter)
            packs, objective = tiny.packs(data), tiny.WeightedLoss(tiny.token_weights(data))
            for _ in range(3):
                reference = trainer.log_probs(packs, weights="reference")
                trainer.forward_backward(packs, objective)
                trainer.forward_backward(packs, objective, final=True)  # the first sums come back and are added to
                trainer.optim_step()
            result = {n: w.clone() for n, w in trainer.named_parameters()}
            result |= {f"reference {m}": s.log_probs_T for m, s in enumerate(reference)}
        trainer.close()
        return result

    base = run(False)
    for knobs in (
        dict(),
        dict(resident_bytes=0),
        dict(num_grad_slabs=2),
        dict(checkpoint_interval=3, resident_bytes=0),
        dict(ring_depth=1),
        dict(overlap_optimizer=False),
    ):
        slow = run(True, **knobs)
        assert all(torch.equal(slow[n], base[n]) for n in base), knobs


class EntropyRegularized(NegativeLogLikelihood):
    """Needs the head's largest backward."""

    def __call__(self, stats, pack):
        return ObjectiveOutput(loss=super().__call__(stats, pack).loss - 1e-6 * stats.entropy_T.sum())


@pytest.mark.parametrize(
    "shape, layers, budget",
    [("qwen2.5-7b", 3, 6.0), ("qwen2.5-7b", 3, 9.0), ("qwen2.5-1.5b", 3, 4.0), ("qwen3-32b", 2, 9.0)],
)
def test_the_budget_is_kept_at_real_width(shape, layers, budget):
    """Packs of the plan's own size, then the longest sequence it admits, with entropy in the loss and gradients that come back:
    what is allocated stays under the plan's peak, and the process inside the budget by NVML."""
    pynvml = pytest.importorskip("pynvml")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    config = shape_config(shape, layers=layers)
    trainer = StreamTrainer.from_config(config, config=StreamConfig(gpu_budget_gb=budget), adamw=AdamWConfig())
    plan = trainer.plan
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    longest = torch.randint(0, config.vocab_size, (plan.max_pack_tokens,))
    for data in (random_sequences(3 * trainer.pack_tokens, 1024, config.vocab_size, seed=0), [longest]):
        torch.cuda.reset_peak_memory_stats()
        packs = pack_sequences(data, max_tokens=trainer.pack_tokens)
        for _ in range(2):
            trainer.forward_backward(packs, EntropyRegularized(packs), entropy=True)
        trainer.optim_step()
        trainer.synchronize()
        tokens = -(-max(p.num_tokens for p in packs) // PACK_MULTIPLE) * PACK_MULTIPLE
        planned, allocated = plan.peak(tokens), torch.cuda.max_memory_allocated()
        print(
            f"{shape} budget {budget}: {len(packs)} packs of {tokens}, head chunk {plan.head_chunk(tokens)}, planned "
            f"{planned / 1e9:.2f} GB, allocated {allocated / 1e9:.2f}, reserved {torch.cuda.max_memory_reserved() / 1e9:.2f}, "
            f"cap {plan.gpu_cap_bytes / 1e9:.2f}, retries {torch.cuda.memory_stats().get('num_alloc_retries', 0)}"
        )
        assert allocated <= planned
        # no retry: nothing had to be given back to the driver to find room, so memory was never in too many pieces
        assert torch.cuda.memory_stats().get("num_alloc_retries", 0) == retries
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    used = next(p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid())
    context = used - torch.cuda.memory_reserved()
    print(f"context {context / 1e9:.2f} GB")
    assert context <= CONTEXT_BYTES
    assert torch.cuda.max_memory_reserved() + context <= budget * 1e9
    trainer.close()


def test_trainers_one_after_the_other_share_the_budget(tmp_path):
    """A closed trainer's memory is there for the next, whatever its size, and two at once have each their own."""
    directory = tiny.saved(tiny.model(tiny.config(layers=3), dtype=torch.bfloat16), tmp_path)
    packs, objective = tiny.packs(tiny.sequences()), tiny.WeightedLoss(tiny.token_weights(tiny.sequences()))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def use(trainer):
        trainer.forward_backward(packs, objective, final=True)
        assert trainer.optim_step().stepped

    for budget in (4.0, 3.0, 5.0, 5.0):
        trainer = tiny.trainer(directory, device="cuda", param_dtype="bfloat16", gpu_budget_gb=budget)
        use(trainer)
        assert torch.cuda.memory_reserved() - before <= trainer.plan.gpu_cap_bytes
        trainer.close()
    pair = [tiny.trainer(directory, device="cuda", param_dtype="bfloat16", gpu_budget_gb=3.0) for _ in range(2)]
    for trainer in pair:
        use(trainer)
    assert torch.cuda.memory_reserved() - before <= 2 * pair[0].plan.gpu_cap_bytes
    pair[0].close()
    use(pair[1])
    pair[1].close()
    del trainer, pair
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 200e6  # workspaces


def test_memory_that_the_process_holds_beside_the_trainer_is_named(tmp_path):
    directory = tiny.saved(tiny.model(tiny.config(layers=3), dtype=torch.bfloat16), tmp_path)
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.empty(3_000_000_000, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match="already holds [3-9].* GB, which gpu_budget_gb covers too"):
        tiny.trainer(directory, device="cuda", param_dtype="bfloat16", gpu_budget_gb=3.0)
    del held
    gc.collect()  # what was begun of the trainer
    torch.cuda.empty_cache()
    tiny.trainer(directory, device="cuda", param_dtype="bfloat16", gpu_budget_gb=3.0).close()


def test_compiling_the_exact_attention_path_is_refused(tmp_path):
    directory = tiny.saved(tiny.model(tiny.config(layers=3), dtype=torch.bfloat16), tmp_path)
    with pytest.raises(ValueError, match="compile=true needs attention=varlen or flash_attn"):
        tiny.trainer(directory, device="cuda", param_dtype="bfloat16", attention="sdpa", compile=True)


def test_the_reservation_stays_when_others_empty_the_cache(tmp_path):
    """VERL does once the model is set up, and then a rollout engine measures what is free."""
    directory = tiny.saved(tiny.model(tiny.config(layers=3), dtype=torch.bfloat16), tmp_path)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    held = []

    def others(trainer):
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved() - before)

    trainer = tiny.trainer(directory, device="cuda", param_dtype="bfloat16", gpu_budget_gb=3.0, on_reserved=others)
    others(trainer)
    trainer.warm_up()
    others(trainer)
    assert min(held) > 0.9 * trainer.plan.gpu_cap_bytes and max(held) <= trainer.plan.gpu_cap_bytes
    trainer.close()


def test_expandable_segments_of_others_do_not_matter(tmp_path):
    """VERL switches them off and on around its weight transfer, and empties the cache."""
    directory = tiny.saved(tiny.model(tiny.config(layers=3), dtype=torch.bfloat16), tmp_path)
    packs = tiny.packs(tiny.sequences())
    trainer = tiny.trainer(directory, device="cuda", param_dtype="bfloat16")
    results = []
    for setting in ("False", "True", "False"):
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{setting}")
        torch.cuda.empty_cache()
        results.append([s.log_probs_T for s in trainer.log_probs(packs)])
        trainer.forward_backward(packs, tiny.WeightedLoss(tiny.token_weights(tiny.sequences())))
        trainer.zero_grad()
        assert torch.cuda.max_memory_reserved() <= trainer.plan.gpu_cap_bytes
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    trainer.close()


def test_compiled_layers_compile_once():
    """Two graphs for the layers and two for the head, whatever the packs' sizes: nothing is compiled in steady state. Beside them
    a pack of one sequence, and one with a single predicted token."""
    config = shape_config("qwen2.5-0.5b", layers=2)
    trainer = StreamTrainer.from_config(
        config, config=StreamConfig(pack_tokens=2048, compile=True), adamw=AdamWConfig()
    )
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()

    def step(lengths, seed, predict=None):
        data = [
            torch.randint(0, config.vocab_size, (n,), generator=torch.Generator().manual_seed(seed)) for n in lengths
        ]
        packs = pack_sequences(data, max_tokens=2048, predict=predict)
        trainer.forward_backward(packs, NegativeLogLikelihood(packs), final=True)
        trainer.optim_step()

    step([700, 300, 900, 1500, 1000], 0)
    step([128] * 16, 1)
    graphs = counters["stats"]["unique_graphs"]
    for seed, lengths in enumerate(([896, 100], [64] * 20, [2000], [1024, 1024], [5, 6, 7], [1333] * 5)):
        step(lengths, seed)
    one = torch.zeros(200, dtype=torch.bool)
    one[10] = True
    step([200], 9, predict=[one])
    print("graphs", dict(counters["stats"]))
    assert (
        counters["stats"]["unique_graphs"] <= graphs + 2
    )  # a single row is a shape of its own for the head's two kernels
    trainer.close()


def test_nothing_is_compiled_after_warming_up():
    config = shape_config("qwen2.5-0.5b", layers=2)
    trainer = StreamTrainer.from_config(
        config, config=StreamConfig(pack_tokens=2048, compile=True), adamw=AdamWConfig()
    )
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    trainer.warm_up()
    graphs = counters["stats"]["unique_graphs"]
    data = [torch.randint(0, config.vocab_size, (n,)) for n in (700, 300, 900, 1500, 1000)]
    packs = pack_sequences(data, max_tokens=2048)
    for entropy in (True, False):
        trainer.log_probs(packs, entropy=entropy)
    trainer.forward_backward(packs, NegativeLogLikelihood(packs), final=True)
    assert trainer.optim_step().stepped and graphs > 0
    assert counters["stats"]["unique_graphs"] == graphs
    trainer.close()


def test_refused_pinning_is_a_warning_and_no_more(caplog):
    """The same memory twice: CUDA refuses, the region stays pageable, and the next kernel does not report the refusal."""
    from megatrain_rl.host import pinned

    region = pinned.HostRegion(1 << 20, torch.float32, pin=True)
    assert region.pinned
    assert not pinned._register(region.flat)
    assert "pinning" in caplog.text
    assert torch.ones(1000, device="cuda").add_(1).sum().item() == 2000
    region.close()


def test_the_caller_may_be_on_any_stream(tmp_path, deterministic):
    """Built on one stream, used on another: kernels still go where the transfers expect them."""
    directory = tiny.saved(tiny.model(tiny.config(layers=7), dtype=torch.bfloat16), tmp_path)
    packs = tiny.packs(tiny.sequences())
    results = []
    for other in (False, True):
        trainer = tiny.trainer(directory, device="cuda", param_dtype="bfloat16")
        with torch.cuda.stream(torch.cuda.Stream() if other else torch.cuda.current_stream()):
            if other:
                torch.cuda._sleep(50_000_000)
            results.append([s.log_probs_T for s in trainer.log_probs(packs)])
        trainer.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_flash_attn_is_called_as_its_interface_says(tmp_path, monkeypatch):
    """flash-attn itself need not be installed: a stand-in with its documented signature computes by torch's varlen kernel."""
    from torch.nn.attention.varlen import varlen_attn

    from megatrain_rl.model.attention import _VARLEN_GQA

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1),
    ):  # fmt: skip
        assert causal and dropout_p == 0.0
        return varlen_attn(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale=softmax_scale,
            window_size=(window_size[0], 0), **_VARLEN_GQA,
        )  # fmt: skip

    stand_in = types.ModuleType("flash_attn")
    stand_in.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    directory = tiny.saved(tiny.model(tiny.config(), dtype=torch.bfloat16), tmp_path)
    results = []
    for attention in ("varlen", "flash_attn"):
        trainer = tiny.trainer(directory, device="cuda", attention=attention, param_dtype="bfloat16")
        results.append([s.log_probs_T for s in trainer.log_probs(tiny.packs(tiny.sequences()))])
        trainer.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_attention_backends_agree(tmp_path, backend):
    """bf16 log-probs of either backend stay as close to fp32 as eager's."""
    model = tiny.model(tiny.config(), dtype=torch.bfloat16, device="cuda")
    data = tiny.sequences((64, 100, 33))
    trainer = tiny.trainer(
        tiny.saved(model, tmp_path), device="cuda", attention=backend, param_dtype="bfloat16", pack_tokens=256
    )
    import oracle

    (stats,) = trainer.log_probs(tiny.packs(data, max_tokens=256))
    eager = oracle.token_stats(model, data, [1.0] * 3).log_probs
    exact = oracle.token_stats(model.float(), data, [1.0] * 3).log_probs
    flat = [torch.cat([torch.cat([x.detach().cpu(), torch.zeros(1)]) for x in each]) for each in (eager, exact)]
    assert (stats.log_probs_T - flat[1]).norm() <= 1.1 * (flat[0] - flat[1]).norm()
    trainer.close()
