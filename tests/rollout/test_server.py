"""The server's contract with VERL, on the class itself: no Ray, no processes."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from .conftest import EOS, build_model

pytest.importorskip("verl")

from verl.workers.config import RolloutConfig

from megatrain_rl.rollout.server import EmbeddedServer

PROMPT = [7, 8, 9]
GREEDY = {"temperature": 0.0, "logprobs": True}


def make_server(eos=EOS, generation_eos=None, **settings) -> EmbeddedServer:
    options = {
        "prompt_length": 16,
        "response_length": 10,
        "dtype": "float32",
        "tensor_model_parallel_size": 1,
        **settings,
    }
    model_config = SimpleNamespace(
        hf_config=build_model().config,
        tokenizer=SimpleNamespace(eos_token_id=eos),
        generation_config=GenerationConfig(eos_token_id=generation_eos),
        trust_remote_code=False,
    )
    return EmbeddedServer(RolloutConfig(name="embedded", **options), model_config, replica_rank=0)


async def send(server, model, step=1, bucket_size=3):
    pairs = [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    await server.begin_weight_update()
    for i in range(0, len(pairs), bucket_size):
        await server.add_weights(pairs[i : i + bucket_size])
    await server.commit_weight_update(step)


def serve(scenario, **settings):
    """Run `scenario(server)` on a server that has the weights of build_model(0)."""

    async def main():
        server = make_server(**settings)
        await server.launch_server()
        await send(server, build_model(0))
        return await asyncio.wait_for(scenario(server), timeout=60)

    return asyncio.run(main())


def test_many_requests_at_once_get_their_own_answers():
    async def scenario(server):
        prompts = [[6 + i] * (1 + i) for i in range(9)]
        together = await asyncio.gather(
            *[
                server.generate(prompt_ids=p, sampling_params=dict(GREEDY), request_id=str(i))
                for i, p in enumerate(prompts)
            ]
        )
        alone = [await server.generate(p, dict(GREEDY), "x") for p in prompts]
        assert [o.token_ids for o in together] == [o.token_ids for o in alone]
        for output in together:
            assert output.stop_reason == "completed" and len(output.log_probs) == len(output.token_ids) <= 10
            assert output.extra_fields["global_steps"] == 1

    serve(scenario)


def test_unknown_keywords_of_later_verl_versions_are_tolerated():
    async def scenario(server):
        output = await server.generate(
            prompt_ids=PROMPT,
            sampling_params=dict(GREEDY),
            request_id="a",
            image_data=None,
            video_data=None,
            priority=3,
        )
        assert output.token_ids
        await server.wake_up(tags=["weights"])
        await server.sleep()
        await server.release_kv_cache()
        await server.resume_kv_cache()
        await server.clear_kv_cache()
        await server.start_profile(step=1)
        await server.stop_profile()
        await server.set_global_steps(4)
        assert (await server.generate(PROMPT, dict(GREEDY), "b")).extra_fields["global_steps"] == 4

    serve(scenario)


def test_limits_log_probs_on_request_and_eos_of_the_generation_config():
    async def scenario(server):
        short = await server.generate(PROMPT, {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}, "a")
        assert len(short.token_ids) == 3 and short.log_probs is None
        return (await server.generate(PROMPT, {**GREEDY, "ignore_eos": True}, "b")).token_ids

    tokens = serve(scenario)
    assert len(tokens) == 10

    async def stopping(server):
        return (await server.generate(PROMPT, dict(GREEDY), "a")).token_ids

    stop = tokens[4]
    assert serve(stopping, eos=EOS, generation_eos=[stop, 95]) == tokens[: tokens.index(stop) + 1]


def test_unseeded_answers_repeat_from_run_to_run_and_siblings_differ():
    async def scenario(server):
        outputs = await asyncio.gather(*[server.generate(PROMPT, {"temperature": 1.0}, str(i)) for i in range(4)])
        return sorted(o.token_ids for o in outputs)

    first = serve(scenario, seed=1)
    assert serve(scenario, seed=1) == first
    assert serve(scenario, seed=2) != first
    assert len(set(map(tuple, first))) > 1


def test_a_bad_request_fails_alone():
    async def scenario(server):
        bad = [
            server.generate(PROMPT, {"temperature": 1.0, "top_a": 1}, "a"),
            server.generate([], dict(GREEDY), "b"),
            server.generate(list(range(6, 32)), dict(GREEDY), "c"),
            server.generate([10_000], dict(GREEDY), "d"),
            server.generate(PROMPT, dict(GREEDY), "e", image_data=["x"]),
        ]
        *errors, good = await asyncio.gather(*bad, server.generate(PROMPT, dict(GREEDY), "f"), return_exceptions=True)
        assert all(isinstance(e, ValueError) for e in errors), errors
        assert good.token_ids

    serve(scenario)


def test_an_error_of_a_step_reaches_every_caller_and_the_server_lives_on():
    async def scenario(server):
        broken = build_model(0)
        torch.nn.init.constant_(broken.model.norm.weight, float("nan"))
        await send(server, broken)
        results = await asyncio.gather(
            *[server.generate([*PROMPT, i], dict(GREEDY), str(i)) for i in range(6, 9)], return_exceptions=True
        )
        assert all(isinstance(r, FloatingPointError) for r in results), results
        await send(server, build_model(0))
        assert (await server.generate(PROMPT, dict(GREEDY), "z")).token_ids

    serve(scenario)


def test_abort_returns_what_there_is_and_resume_goes_on():
    async def scenario(server):
        whole = (await server.generate(PROMPT, {**GREEDY, "max_tokens": 90}, "w")).token_ids
        under_way = asyncio.create_task(server.generate(PROMPT, {**GREEDY, "max_tokens": 90}, "a"))
        while len(server._generator._running) == 0 or len(server._generator._running[0].token_ids) < 3:
            await asyncio.sleep(0.001)
        result = await server.abort_all_requests()
        aborted = await under_way
        assert result["aborted_count"] == 1 and aborted.stop_reason == "aborted"
        assert 3 <= len(aborted.token_ids) < 90 and aborted.token_ids == whole[: len(aborted.token_ids)]
        held = asyncio.create_task(server.generate(PROMPT + aborted.token_ids, {**GREEDY, "max_tokens": 5}, "a"))
        await asyncio.sleep(0.1)
        assert not held.done()
        await server.resume_generation()
        n = len(aborted.token_ids)
        assert (await held).token_ids == whole[n : n + 5]

    serve(scenario, ignore_eos=True, max_model_len=120)


def test_a_rejecting_gate_answers_at_once_and_a_plain_abort_holds_again():
    async def scenario(server):
        await server.abort_all_requests(reject_request=True)
        output = await server.generate(PROMPT, dict(GREEDY), "a")
        assert output.stop_reason == "aborted" and output.token_ids == []
        await server.abort_all_requests()
        held = asyncio.create_task(server.generate(PROMPT, dict(GREEDY), "b"))
        await asyncio.sleep(0.05)
        assert not held.done()
        await server.resume_generation()
        assert (await held).stop_reason == "completed"

    serve(scenario)


def test_a_cancelled_caller_leaves_the_batch():
    async def scenario(server):
        task = asyncio.create_task(server.generate(PROMPT, {**GREEDY, "max_tokens": 90}, "a"))
        while not server._generator._running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not server._generator._running and not server._futures
        assert (await server.generate(PROMPT, dict(GREEDY), "b")).token_ids

    serve(scenario, ignore_eos=True, max_model_len=120)


def test_each_weight_of_an_update_changes_the_answers_log_probs():
    async def scenario(server):
        request = {"temperature": 1.0, "logprobs": True, "seed": 1, "ignore_eos": True, "max_tokens": 4}
        before = (await server.generate(PROMPT, request, "a")).log_probs
        for name, _ in build_model(0).named_parameters():
            changed = build_model(0)
            with torch.no_grad():
                changed.get_parameter(name).mul_(1.5).add_(0.05)
            await send(server, changed)
            assert (await server.generate(PROMPT, request, "a")).log_probs != before, name
        await send(server, build_model(0))
        assert (await server.generate(PROMPT, request, "a")).log_probs == before

    serve(scenario)


def test_no_step_comes_between_new_weights_and_a_fresh_cache():
    """Every step decodes with keys and values of the weights it uses, however updates and steps are interleaved."""

    async def scenario(server):
        order = []
        for owner, name in ((server._generator, "drop_cache"), (server._generator, "step")):
            plain = getattr(owner, name)
            setattr(owner, name, lambda plain=plain, name=name: (order.append(name), plain())[1])
        answer = asyncio.create_task(server.generate(PROMPT, {"max_tokens": 10}, "r"))
        for step in range(2, 6):
            await asyncio.sleep(0.02)
            await send_recorded(server, build_model(step), step, order)
        await answer
        commits = [i for i, name in enumerate(order) if name == "commit"]
        assert len(commits) == 4 and all(order[i + 1] == "drop_cache" for i in commits)

    async def send_recorded(server, model, step, order):
        await server.begin_weight_update()
        await server.add_weights([(n, p.detach().clone()) for n, p in model.named_parameters()])
        commit = server._update.commit
        server._update.commit = lambda: (order.append("commit"), commit())[1]
        await server.commit_weight_update(step)

    serve(scenario)


def test_wrong_updates_raise_and_leave_the_old_weights():
    async def scenario(server):
        before = (await server.generate(PROMPT, dict(GREEDY), "a")).log_probs
        with pytest.raises(RuntimeError, match="begin_weight_update"):
            await server.add_weights([])
        await server.begin_weight_update()
        with pytest.raises(ValueError, match=r"no parameter lm_head\.bias"):
            await server.add_weights([("lm_head.bias", torch.zeros(3))])
        with pytest.raises(ValueError, match="did not arrive"):
            await server.commit_weight_update(9)
        after = await server.generate(PROMPT, dict(GREEDY), "a")
        assert after.log_probs == before and after.extra_fields["global_steps"] == 1

    serve(scenario)


def test_no_answer_before_the_first_weights():
    async def main():
        server = make_server()
        await server.launch_server()
        with pytest.raises(RuntimeError, match="before the trainer sent weights"):
            await server.generate(PROMPT, dict(GREEDY), "a")

    asyncio.run(main())


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"rollout\.dtype='int8'"):
        make_server(dtype="int8")
    with pytest.raises(ValueError, match="num_thread"):
        make_server(engine_kwargs={"embedded": {"num_thread": 2}})
    with pytest.raises(ValueError, match="num_threads=0"):
        make_server(engine_kwargs={"embedded": {"num_threads": 0}})
    with pytest.raises(ValueError, match="EOS"):
        make_server(eos=None)


def test_thread_count_and_dtype_are_set_on_purpose():
    server = make_server(engine_kwargs={"embedded": {"num_threads": 3}}, dtype="bfloat16")
    assert server._thread.submit(torch.get_num_threads).result() == 3
    assert {p.dtype for p in server._model.parameters()} == {torch.bfloat16}
