"""The scripted engine says its script and cuts it as a real engine would."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl.engines.base import WeightSource
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import ContextOverflowError, EngineError, UsageError
from agentrl.types import SamplingParams

PARAMS = SamplingParams(max_new_tokens=8, stop_token_ids=(99,))


class CharacterTokenizer:
    eos_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]


async def test_each_rollout_hears_the_responses_in_turn_and_from_the_first_again():
    engine = ScriptedEngine([[1, 99], [2, 99]])
    said = {
        rollout: [
            int((await engine.generate([5], PARAMS, rollout_id=rollout)).token_ids[0])
            for _ in range(3)
        ]
        for rollout in ("a", "b")
    }
    assert said == {"a": [1, 2, 1], "b": [1, 2, 1]}


async def test_a_response_ends_at_its_first_stop_id_which_is_kept():
    generation = await ScriptedEngine([[1, 2, 99, 3]]).generate([5], PARAMS)
    assert generation.token_ids.tolist() == [1, 2, 99]
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize("response", [[1] * 8, [1] * 9, [*[1] * 8, 99]])
async def test_a_response_that_reaches_max_new_tokens_is_cut_as_length(response):
    generation = await ScriptedEngine([response]).generate([5], PARAMS)
    assert generation.token_ids.tolist() == [1] * 8
    assert generation.finish_reason == "length"


async def test_a_stop_id_before_min_new_tokens_does_not_stop():
    params = SamplingParams(max_new_tokens=8, min_new_tokens=2, stop_token_ids=(99,))
    generation = await ScriptedEngine([[99, 99, 1]]).generate([5], params)
    assert generation.token_ids.tolist() == [99, 99]
    with pytest.raises(EngineError, match="min_new_tokens is 2"):
        await ScriptedEngine([[1]]).generate([5], params)


async def test_log_probabilities_are_given_unless_they_are_not_asked_for():
    engine = ScriptedEngine([[1, 2]], logprob=-0.25)
    asked = await engine.generate([5], SamplingParams(max_new_tokens=4))
    unasked = await engine.generate([5], SamplingParams(max_new_tokens=4, logprobs=False))
    np.testing.assert_array_equal(asked.logprobs, np.float32([-0.25, -0.25]))
    assert unasked.logprobs is None


async def test_a_function_sees_prompt_params_and_rollout():
    seen = []

    def script(token_ids, params, rollout_id):
        seen.append((list(token_ids), params, rollout_id))
        return [len(token_ids)]

    engine = ScriptedEngine(script)
    generation = await engine.generate([5, 6], PARAMS, rollout_id="r", group_id="g")
    assert seen == [([5, 6], PARAMS, "r")]
    assert generation.token_ids.tolist() == [2]
    assert engine.calls[0].token_ids == (5, 6)
    assert engine.calls[0].group_id == "g"


async def test_a_request_over_the_context_is_refused_before_it_runs():
    engine = ScriptedEngine([[1]], max_model_len=10)
    await engine.generate([5, 6], PARAMS)
    with pytest.raises(ContextOverflowError, match="3 prompt tokens and 8 new ones"):
        await engine.generate([5, 6, 7], PARAMS)


async def test_the_chosen_calls_fail_and_the_others_do_not():
    engine = ScriptedEngine([[1]], failures={1})
    await engine.generate([5], PARAMS)
    with pytest.raises(EngineError, match="call 1 fails"):
        await engine.generate([5], PARAMS)
    await engine.generate([5], PARAMS)


async def test_a_file_is_said_line_by_line_with_an_end_of_turn_token(tmp_path: Path):
    path = tmp_path / "script.txt"
    path.write_text("ab\n\nx\\ny\n")
    engine = ScriptedEngine.from_file(path, CharacterTokenizer())
    first = await engine.generate([5], PARAMS)
    second = await engine.generate([5], PARAMS)
    assert first.token_ids.tolist() == [ord("a"), ord("b"), 0]
    assert second.token_ids.tolist() == [ord("x"), ord("\n"), ord("y"), 0]


def test_a_missing_or_empty_script_is_a_usage_error(tmp_path: Path):
    with pytest.raises(UsageError, match=r"set engine\.script"):
        ScriptedEngine.from_file(tmp_path / "none.txt", CharacterTokenizer())
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UsageError, match="one response a line"):
        ScriptedEngine.from_file(tmp_path / "empty.txt", CharacterTokenizer())


async def test_a_held_call_samples_under_the_new_weights():
    engine = ScriptedEngine([[1, 2]])
    await engine.pause("keep")
    call = asyncio.create_task(engine.generate([5], PARAMS))
    await asyncio.sleep(0)
    drawn = []
    await engine.update_weights(WeightSource(lambda: iter(drawn), version=3))
    assert not call.done()
    await engine.resume()
    assert (await call).weight_versions.tolist() == [3, 3]


async def test_an_aborted_call_ends_without_tokens_and_later_ones_wait_for_resume():
    engine = ScriptedEngine([[1, 2]], latency=0.01)
    call = asyncio.create_task(engine.generate([5], PARAMS))
    await asyncio.sleep(0)
    await engine.pause("abort")
    assert (await call).finish_reason == "abort"
    later = asyncio.create_task(engine.generate([5], PARAMS))
    await asyncio.sleep(0.02)
    assert not later.done()
    await engine.resume()
    assert (await later).token_ids.tolist() == [1, 2]


async def test_pause_wait_lets_calls_in_flight_finish():
    engine = ScriptedEngine([[1, 2]], latency=0.01)
    call = asyncio.create_task(engine.generate([5], PARAMS))
    await asyncio.sleep(0)
    await engine.pause("wait")
    assert (await call).token_ids.tolist() == [1, 2]


async def test_a_second_pause_decides_over_calls_that_the_first_one_holds():
    engine = ScriptedEngine([[1, 2]], latency=0.001)
    call = asyncio.create_task(engine.generate([5], PARAMS))
    await asyncio.sleep(0)
    await engine.pause("keep")
    await asyncio.sleep(0.01)
    assert not call.done()
    await engine.pause("wait")
    assert (await call).token_ids.tolist() == [1, 2]


async def test_weights_are_drawn_to_their_end_because_they_are_a_collective():
    drawn = []

    def weights():
        for name in ("a", "b"):
            drawn.append(name)
            yield name, None

    engine = ScriptedEngine([[1]])
    await engine.update_weights(WeightSource(weights, version=1))
    assert drawn == ["a", "b"]
    assert engine.weight_version == 1


async def test_stats_count_since_the_last_call_and_a_closed_engine_refuses():
    engine = ScriptedEngine([[1, 2]])
    await engine.generate([5, 6, 7], PARAMS)
    assert engine.stats() == {"prompt_tokens": 3, "sampled_tokens": 2}
    assert engine.stats() == {"prompt_tokens": 0, "sampled_tokens": 0}
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate([5], PARAMS)


def test_it_does_not_import_torch():
    code = "import sys, agentrl.engines.scripted; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
