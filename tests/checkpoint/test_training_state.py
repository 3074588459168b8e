"""Resume equals uninterrupted, to the bit; what is broken is refused before anything changes; a crash costs nothing."""

import errno
import json
import random
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatrain_rl.checkpoint import folder, generators, training_state
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.model.hf_export import Companions
from megatrain_rl.optim.lr_schedule import LRSchedule
from megatrain_rl.optim.update import State
from megatrain_rl.trainer import StreamTrainer


def build(directory, dtype="bfloat16", device="cpu", moments="float32", clip_grad=1.0) -> StreamTrainer:
    return StreamTrainer.from_pretrained(
        directory,
        config=StreamConfig(
            pack_tokens=48, cpu_threads=1, param_dtype=dtype, grad_dtype=dtype, optimizer_state_dtype=moments
        ),
        adamw=AdamWConfig(lr=1e-3, clip_grad=clip_grad),
        schedule=LRSchedule(kind="cosine", warmup_steps=2, total_steps=8),
        device=device,
    )


def train(trainer: StreamTrainer, steps: int) -> None:
    """Steps on data from the torch generator, so that a lost generator state would show."""
    for _ in range(steps):
        data = [torch.randint(0, tiny.VOCAB, (n,)) for n in tiny.LENGTHS]
        trainer.forward_backward(tiny.packs(data), tiny.WeightedLoss(tiny.token_weights(data)))
        trainer.optim_step()
        trainer.schedule.step()


def state(trainer: StreamTrainer) -> dict[str, torch.Tensor]:
    everything = {n: w.clone() for n, w in trainer.named_parameters()}
    for block in trainer.spec.blocks:
        for key, tensor in trainer._optimizer.state[block.name].tensors().items():
            everything[f"{block.name}.{key}"] = tensor.clone()
    return everything


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_resume_equals_uninterrupted(tmp_path, dtype, tied, moments, device, deterministic):
    directory = tiny.saved(tiny.model(tiny.config(tied=tied)), tmp_path / "model")
    whole = build(directory, dtype, device, moments)
    torch.manual_seed(5)
    train(whole, 3)
    whole.save_checkpoint(tmp_path / "step_3")
    whole_lr_at_3 = whole.lr
    train(whole, 3)
    torch.manual_seed(77)
    resumed = build(directory, dtype, device, moments)
    resumed.load_checkpoint(tmp_path / "step_3")
    assert resumed.schedule.steps_done == 3 and resumed.lr == whole_lr_at_3
    train(resumed, 3)
    a, b = state(whole), state(resumed)
    assert not [name for name in a if not torch.equal(a[name], b[name])]
    whole.close()
    resumed.close()


def test_all_generators_are_restored(tmp_path):
    import numpy

    trainer = build(tiny.saved(tiny.model(tiny.config()), tmp_path / "model"))
    trainer.save_checkpoint(tmp_path / "c")
    expected = (torch.rand(3).tolist(), numpy.random.rand(3).tolist(), random.random())
    trainer.load_checkpoint(tmp_path / "c")
    assert (torch.rand(3).tolist(), numpy.random.rand(3).tolist(), random.random()) == expected
    trainer.close()


def check_shards(saved: Path, trainer: StreamTrainer, shard_bytes: int) -> None:
    """Names as transformers writes them; each parameter once; the index counts parameters' bytes, not those of the
    blocks they are views of; no shard above the limit but one of a single parameter."""
    files = sorted(saved.glob("*.safetensors"))
    names = {file.name: set(load_file(file)) for file in files}
    sizes = {name: weight.nbytes for name, weight in trainer.named_parameters()}
    assert sorted(name for each in names.values() for name in each) == sorted(sizes)
    assert all(len(each) == 1 or sum(sizes[name] for name in each) <= shard_bytes for each in names.values())
    if shard_bytes > 1e6:
        assert list(names) == ["model.safetensors"] and not (saved / "model.safetensors.index.json").exists()
        return
    assert len(files) > 2
    assert list(names) == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert index["weight_map"] == {name: file for file, each in names.items() for name in each}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_huggingface_loads_what_is_saved(tmp_path, family, tied, monkeypatch):
    """One file or several shards: same logits as the trainer's weights, tokenizer files beside them."""
    directory = tiny.saved(tiny.model(tiny.config(family, tied=tied)), tmp_path / "model")
    (directory / "tokenizer_config.json").write_text("{}")
    trainer = build(directory, "float32")
    train(trainer, 1)
    for shard_bytes in (1 << 30, 100_000):
        monkeypatch.setattr("megatrain_rl.model.hf_export.SHARD_BYTES", shard_bytes)
        trainer.save_checkpoint(tmp_path / "c")
        saved = tmp_path / "c" / "huggingface"
        assert (saved / "tokenizer_config.json").is_file()
        check_shards(saved, trainer, shard_bytes)
        model, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert model.config.architectures
        for name, weight in trainer.named_parameters():
            assert torch.equal(model.get_parameter(name), weight), name
    trainer.close()


def test_a_crash_while_saving_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    trainer = build(tiny.saved(tiny.model(tiny.config()), tmp_path / "model"))
    train(trainer, 1)
    trainer.save_checkpoint(tmp_path / "c")
    kept = state(trainer)
    train(trainer, 1)
    monkeypatch.setattr(generators, "write", lambda file: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.save_checkpoint(tmp_path / "c")
    monkeypatch.undo()
    trainer.load_checkpoint(tmp_path / "c")
    now = state(trainer)
    assert all(torch.equal(now[n], kept[n]) for n in kept)
    trainer.save_checkpoint(tmp_path / "c")  # over an existing one and what the crash left
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "model"]
    trainer.close()


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path / "model"))
    trainer.save_checkpoint(tmp_path / "run" / "1")
    size = sum(file.stat().st_size for file in (tmp_path / "run" / "1").rglob("*.safetensors"))
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((int(0.9 * size), False), (int(1.1 * size), True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        if fits:
            trainer.save_checkpoint(tmp_path / "run" / "2")
            continue
        with pytest.raises(OSError, match=r"trainer\.max_actor_ckpt_to_keep") as raised:
            trainer.save_checkpoint(tmp_path / "run" / "2")
        assert raised.value.errno == errno.ENOSPC and [p.name for p in (tmp_path / "run").iterdir()] == ["1"]
    assert (tmp_path / "run" / "2" / "trainer_state.json").is_file()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=0, free=0))
    trainer.save_checkpoint(tmp_path / "run" / "3")


def test_a_crash_between_the_renames_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    trainer = build(tiny.saved(tiny.model(tiny.config()), tmp_path / "model"))
    train(trainer, 1)
    trainer.save_checkpoint(tmp_path / "c")
    kept = state(trainer)
    replace, calls = training_state.os.replace, []

    def replace_once(source, target):
        if calls:
            raise KeyboardInterrupt
        calls.append(source)
        replace(source, target)

    monkeypatch.setattr(training_state.os, "replace", replace_once)
    train(trainer, 1)
    with pytest.raises(KeyboardInterrupt):
        trainer.save_checkpoint(tmp_path / "c")
    monkeypatch.undo()
    assert not (tmp_path / "c").exists()
    trainer.load_checkpoint(tmp_path / "c")
    now = state(trainer)
    assert all(torch.equal(now[n], kept[n]) for n in kept)
    trainer.close()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def rewrite(file: Path, **change) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def put(name: str, value: float):
    def change(file: Path) -> None:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
        tensors[name].view(-1)[5] = value
        save_file(tensors, file, metadata=metadata)

    return change


def shorten(file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    save_file({key: tensor[:-2].clone() for key, tensor in load_file(file).items()}, file, metadata=metadata)


def tensors(**change):
    """Rewrite some tensors of a file."""

    def rewrite_tensors(file: Path) -> None:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        save_file(load_file(file) | change, file, metadata=metadata)

    return rewrite_tensors


def widen(file: Path) -> None:
    save_file({name: tensor.float() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


MOMENTS, MODEL = "optimizer/layers.2.safetensors", "huggingface/model.safetensors"


@pytest.mark.parametrize(
    "name, damage, message",
    [
        ("trainer_state.json", lambda f: rewrite(f, format=99), "format 99"), ("trainer_state.json", cut, "trainer_state"),
        ("trainer_state.json", lambda f: rewrite(f, step_count=None), "step_count"),
        ("trainer_state.json", lambda f: rewrite(f, schedule=[]), "schedule"),
        ("trainer_state.json", lambda f: rewrite(f, python_rng=3), "python_rng"),
        ("trainer_state.json", lambda f: rewrite(f, python_rng=[3, [1, 2], None]), "python_rng"),
        ("trainer_state.json", lambda f: rewrite(f, step_count=-1), "step_count"),
        ("trainer_state.json", lambda f: rewrite(f, step_count=True), "step_count"),
        ("trainer_state.json", lambda f: rewrite(f, skipped_steps=0.5), "skipped_steps"),
        ("trainer_state.json", lambda f: rewrite(f, recent_norms=["1.0"]), "recent_norms"),
        ("trainer_state.json", lambda f: rewrite(f, recent_norms=[float("nan")]), "recent_norms"),
        ("trainer_state.json", lambda f: rewrite(f, schedule={}), "schedule"),
        ("trainer_state.json", lambda f: rewrite(f, schedule={"steps_done": "3"}), "schedule"),
        (MOMENTS, Path.unlink, r"layers\.2"), (MOMENTS, cut, r"layers\.2"), (MOMENTS, shorten, r"layers\.2"),
        (MOMENTS, put("exp_avg", float("nan")), r"layers\.2.*exp_avg.*NaN"),
        (MOMENTS, put("exp_avg_sq", float("inf")), r"layers\.2.*exp_avg_sq.*infinite"),
        (MOMENTS, put("exp_avg_sq", -1e-8), r"layers\.2.*exp_avg_sq.*negative"),
        (MODEL, widen, r"model\.safetensors.*F32.*param_dtype is BF16"),
        (MODEL, Path.unlink, r"model\.safetensors"), (MODEL, cut, r"model\.safetensors"),
        (MODEL, put("model.norm.weight", float("nan")), r"model\.safetensors.*model\.norm\.weight.*NaN"),
        ("huggingface/config.json", cut, r"config\.json"),
        ("rng.safetensors", Path.unlink, r"rng\.safetensors"), ("rng.safetensors", cut, r"rng\.safetensors"),
        ("rng.safetensors", tensors(torch=torch.zeros(7, dtype=torch.uint8)), r"rng\.safetensors.*torch's"),
        ("rng.safetensors", tensors(torch=torch.zeros(5056)), r"rng\.safetensors.*torch's"),
        ("rng.safetensors", tensors(numpy_keys=torch.zeros(9, dtype=torch.int64)), r"rng\.safetensors.*numpy's"),
        ("rng.safetensors", tensors(numpy_keys=torch.full((624,), -1)), r"rng\.safetensors.*numpy's"),
        ("rng.safetensors", tensors(numpy_rest=torch.zeros(2, dtype=torch.float64)), r"rng\.safetensors.*numpy's"),
    ],
)  # fmt: skip
def test_a_broken_checkpoint_changes_nothing(tmp_path, name, damage, message):
    """Neither the weights and moments nor the gradients that wait."""
    trainer = build(tiny.saved(tiny.model(tiny.config()), tmp_path / "model"))
    train(trainer, 1)
    trainer.save_checkpoint(tmp_path / "c")
    train(trainer, 1)
    before = state(trainer)
    data = tiny.sequences()
    trainer.forward_backward(tiny.packs(data), tiny.WeightedLoss(tiny.token_weights(data)))
    gradients = {n: g.clone() for n, g in trainer.named_gradients()}
    damage(tmp_path / "c" / name)
    generator = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        trainer.load_checkpoint(tmp_path / "c")
    after = state(trainer)
    assert all(torch.equal(after[n], before[n]) for n in before)
    assert all(torch.equal(g, gradients[n]) for n, g in trainer.named_gradients())
    assert torch.equal(torch.get_rng_state(), generator)
    with pytest.raises(ValueError, match="nowhere"):
        trainer.load_checkpoint(tmp_path / "nowhere")
    trainer.close()


def foreign_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("three years of work")


def a_file(path: Path) -> None:
    path.write_text("three years of work")


def a_link(path: Path) -> None:
    foreign_folder(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("not there"))


@pytest.mark.parametrize("make", [foreign_folder, a_file, a_link, a_link_to_nothing])
@pytest.mark.parametrize("suffix", ["", ".old", ".tmp"])
def test_nothing_foreign_is_replaced(tmp_path, make, suffix):
    """Nor anything written or removed beside it."""
    trainer = build(tiny.saved(tiny.model(tiny.config(layers=1)), tmp_path / "model"))
    run = tmp_path / "run"
    run.mkdir()
    make(run / f"c{suffix}")
    before = {p: (p.is_symlink(), p.read_bytes() if p.is_file() else None) for p in run.rglob("*")}
    with pytest.raises(FileExistsError, match=r"trainer\.default_local_dir"):
        trainer.save_checkpoint(run / "c")
    assert {p: (p.is_symlink(), p.read_bytes() if p.is_file() else None) for p in run.rglob("*")} == before
    trainer.close()


def test_what_others_put_beside_a_checkpoint_stays(tmp_path):
    """VERL keeps the state of its data loader there, and a user perhaps a note. An empty folder is no obstacle."""
    trainer = build(tiny.saved(tiny.model(tiny.config(layers=1)), tmp_path / "model"))
    for empty in ("c", "c.old", "c.tmp"):
        (tmp_path / "run" / empty).mkdir(parents=True)
    trainer.save_checkpoint(tmp_path / "run" / "c")
    (tmp_path / "run" / "c" / "data_0.pt").write_text("position")
    foreign_folder(tmp_path / "run" / "c" / "notes")
    train(trainer, 1)
    trainer.save_checkpoint(tmp_path / "run" / "c")
    assert (tmp_path / "run" / "c" / "data_0.pt").read_text() == "position"
    assert (tmp_path / "run" / "c" / "notes" / "thesis.tex").is_file()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["c"]
    kept = state(trainer)
    trainer.load_checkpoint(tmp_path / "run" / "c")
    assert all(torch.equal(tensor, kept[n]) for n, tensor in state(trainer).items())
    trainer.close()


def test_what_others_put_into_the_folders_of_a_checkpoint_stays(tmp_path):
    """A model card, say. A name that a later checkpoint needs itself is kept under another."""
    trainer = build(tiny.saved(tiny.model(tiny.config(layers=1)), tmp_path / "model"))
    place = tmp_path / "run" / "c"
    trainer.save_checkpoint(place)
    for name in ("huggingface/README.md", "huggingface/tokenizer_config.json", "optimizer/notes/a.txt", "b.txt"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(name)
    (place / "huggingface" / "link").symlink_to(tmp_path / "model")
    for _ in range(2):
        trainer.save_checkpoint(place)
    assert (place / "huggingface" / "README.md").read_text() == "huggingface/README.md"
    assert (place / "huggingface" / "link").is_symlink() and (place / "optimizer" / "notes" / "a.txt").is_file()
    trainer._companions = Companions(files={"tokenizer_config.json": b"{}"})
    trainer.save_checkpoint(place)
    assert (place / "huggingface" / "tokenizer_config.json").read_text() == "{}"
    kept = (place / "huggingface" / "tokenizer_config.json.old").read_text()
    assert kept == "huggingface/tokenizer_config.json"
    folder.remove(place)
    left = {str(p.relative_to(place)) for p in place.rglob("*") if not p.is_dir() or p.is_symlink()}
    assert left == {
        "huggingface/README.md", "huggingface/link", "huggingface/tokenizer_config.json.old", "optimizer/notes/a.txt", "b.txt",
        folder.MARKER,
    }  # fmt: skip
    assert not folder.is_complete(place) and not folder.remove(place), "nothing of ours is left"
    assert (tmp_path / "model" / "config.json").is_file()
    trainer.save_checkpoint(place)
    assert folder.is_complete(place) and (place / "b.txt").read_text() == "b.txt"
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["c"]
    trainer.close()


def test_a_checkpoint_that_is_removed_in_part_is_none_and_still_ours(tmp_path, monkeypatch):
    trainer = build(tiny.saved(tiny.model(tiny.config(layers=1)), tmp_path / "model"))
    place = tmp_path / "run" / "c"
    trainer.save_checkpoint(place)
    unlink = Path.unlink

    def unlink_one(self, missing_ok=False):
        unlink(self, missing_ok=missing_ok)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", unlink_one)
    with pytest.raises(KeyboardInterrupt):
        folder.remove(place)
    monkeypatch.undo()
    assert not folder.is_complete(place) and folder.is_ours(place)
    trainer.save_checkpoint(place)
    assert folder.is_complete(place)
    folder.remove(place)
    assert not list((tmp_path / "run").iterdir())
    trainer.close()


def test_a_crash_before_others_files_were_moved_loses_none(tmp_path, monkeypatch):
    trainer = build(tiny.saved(tiny.model(tiny.config(layers=1)), tmp_path / "model"))
    place = tmp_path / "run" / "c"
    trainer.save_checkpoint(place)
    (place / "huggingface" / "README.md").write_text("card")
    keep_others = folder.keep_others

    def killed(old, directory):
        if old.exists():
            raise KeyboardInterrupt
        keep_others(old, directory)

    monkeypatch.setattr(folder, "keep_others", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.save_checkpoint(place)
    monkeypatch.undo()
    assert not (place / "huggingface" / "README.md").exists()
    trainer.save_checkpoint(place)
    assert (place / "huggingface" / "README.md").read_text() == "card"
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["c"]
    trainer.close()


@pytest.mark.parametrize("where", [".", "..", "c/.."])
def test_the_folder_one_stands_in_is_no_checkpoint(tmp_path, monkeypatch, where):
    trainer = build(tiny.saved(tiny.model(tiny.config(layers=1)), tmp_path / "model"))
    (tmp_path / "run" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run" / "here")
    with pytest.raises(FileExistsError, match="a folder of its own"):
        trainer.save_checkpoint(where)
    trainer.save_checkpoint("d/../c/")
    trainer.load_checkpoint("c/.")
    assert sorted(p.name for p in (tmp_path / "run" / "here").iterdir()) == ["c"]
    trainer.close()


def test_a_checkpoint_without_a_marker_is_ours_too(tmp_path):
    trainer = build(tiny.saved(tiny.model(tiny.config(layers=1)), tmp_path / "model"))
    trainer.save_checkpoint(tmp_path / "c")
    (tmp_path / "c" / folder.MARKER).unlink()
    trainer.save_checkpoint(tmp_path / "c")
    assert (tmp_path / "c" / folder.MARKER).is_file()
    trainer.close()


def test_state_of_another_layout_is_refused(tmp_path, monkeypatch):
    """Optimizer state is flat: were a layer's parameters ordered otherwise, moments would go to the wrong ones."""
    trainer = build(tiny.saved(tiny.model(tiny.config()), tmp_path / "model"))
    trainer.save_checkpoint(tmp_path / "c")
    layout = training_state._layout
    monkeypatch.setattr(training_state, "_layout", lambda block: layout(block).replace("q_proj", "k_proj"))
    with pytest.raises(ValueError, match=r"layers\.0 .*other parameters"):
        trainer.load_checkpoint(tmp_path / "c")
    trainer.close()


def test_another_dtype_is_refused(tmp_path):
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path / "model")
    trainer = build(directory, "float32")
    trainer.save_checkpoint(tmp_path / "c")
    trainer.close()
    other = build(directory, "bfloat16")
    with pytest.raises(ValueError, match="param_dtype"):
        other.load_checkpoint(tmp_path / "c")
    other.close()


@pytest.mark.parametrize("written, read", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_moments_of_another_dtype_are_refused(tmp_path, written, read):
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path / "model")
    trainer = build(directory, moments=written)
    train(trainer, 1)
    trainer.save_checkpoint(tmp_path / "c")
    trainer.close()
    other = build(directory, moments=read)
    before = state(other)
    with pytest.raises(ValueError, match="optimizer_state_dtype"):
        other.load_checkpoint(tmp_path / "c")
    after = state(other)
    assert all(torch.equal(after[n], before[n]) for n in before)
    other.close()


# By step; the limit is 20 and the norm of factor 1 a few units: steps 1, 6 and 11 are guessed, the first two wrongly,
# and only late in backward is that seen, so that most blocks are corrected.
FACTORS = (1, 7, 1, 1, 1, 1, 10, 1, 1, 1, 1, 1)


def train_with_spikes(trainer: StreamTrainer, steps: range) -> list[int]:
    """With the update beneath backward; the worker has stepped what it may before the norm is looked at. Returns how
    many blocks."""
    data = tiny.sequences()
    packs, guessed = tiny.packs(data), []
    for i in steps:
        weights = [w * FACTORS[i] for w in tiny.token_weights(data)]
        trainer._optimizer._left.clear()
        trainer.forward_backward(packs, tiny.WeightedLoss(weights), final=True)
        trainer._executor.drain()
        trainer._optimizer.settle()
        assert (len(trainer._optimizer._left) > 0) == (trainer._update.state is State.GUESSED)
        guessed.append(len(trainer._optimizer._left))
        assert (trainer.optim_step().grad_norm > 20) == (FACTORS[i] > 1)
        trainer.schedule.step()
    return guessed


@pytest.mark.parametrize(
    "at, moments", [(1, "float32"), (6, "bfloat16"), (7, "float32")], ids=["before", "before-bf16", "after"]
)
def test_resume_equals_uninterrupted_where_a_guess_was_wrong(tmp_path, at, moments):
    """A correction leaves other last bits than a step after backward: a resumed run must guess where the uninterrupted
    one did, so the checkpoint keeps the norms it guesses by."""
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path / "model")
    whole, resumed = (build(directory, moments=moments, clip_grad=20.0) for _ in range(2))
    guessed = train_with_spikes(whole, range(at))
    whole.save_checkpoint(tmp_path / "c")
    guessed += train_with_spikes(whole, range(at, len(FACTORS)))
    assert [n > 0 for n in guessed] == [i in (1, 6, 11) for i in range(len(FACTORS))]
    assert min(guessed[1], guessed[6]) >= 3 and guessed[11] == 6
    resumed.load_checkpoint(tmp_path / "c")
    assert train_with_spikes(resumed, range(at, len(FACTORS))) == guessed[at:]
    a, b = state(whole), state(resumed)
    assert not [name for name in a if not torch.equal(a[name], b[name])]
    whole.close()
    resumed.close()
